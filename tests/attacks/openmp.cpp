// What generated code does with OpenMP, and ways to fail in it. exercise(n) is called with the first input of model.c.
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

// Not <omp.h>: each compiler has its own, and not each is installed.
extern "C" {
int omp_get_num_threads();
int omp_get_thread_num();
int omp_get_max_threads();
int omp_in_parallel();
int omp_get_level();
int omp_get_active_level();
}
extern "C" void aoti_torch_check(bool condition, const char* func, const char* file, uint32_t line, const char* msg);
#define CHECK(condition, text) aoti_torch_check(condition, __func__, "openmp.cpp", __LINE__, text)

namespace {

constexpr long kSum = 1000 * 999 / 2;

void constructs() {
  std::atomic<long> by_static{0}, by_dynamic{0}, by_guided{0}, by_collapse{0}, by_runtime{0};
  std::atomic<int> singles{0}, sections{0}, threads{0}, ordered_wrong{0};
  long in_critical = 0, in_other = 0, reduced = 0, last = 0;
  int copied_sum = 0;
#pragma omp parallel
  {
    ++threads;
#pragma omp for
    for (int i = 0; i < 1000; ++i) by_static += i;
    for (int round = 0; round < 20; ++round) {
#pragma omp for schedule(dynamic, 3) nowait
      for (int i = 0; i < 1000; ++i) by_dynamic += i;
    }
#pragma omp for schedule(guided) lastprivate(last)
    for (long i = 999; i >= 0; --i) {
      by_guided += i;
      last = i;
    }
#pragma omp for collapse(2) schedule(dynamic)
    for (unsigned long long i = 0; i < 10; ++i)
      for (unsigned long long j = 0; j < 100; ++j) by_collapse += static_cast<long>(i * 100 + j);
#pragma omp for schedule(runtime)
    for (int i = 0; i < 1000; ++i) by_runtime += i;
#pragma omp single
    ++singles;
    int copied = 0;
#pragma omp single copyprivate(copied)
    copied = 7;
#pragma omp atomic
    copied_sum += copied;
#pragma omp sections
    {
#pragma omp section
      sections += 1;
#pragma omp section
      sections += 10;
#pragma omp section
      sections += 100;
    }
    for (int i = 0; i < 100; ++i) {
#pragma omp critical
      ++in_critical;
#pragma omp critical(other)
      ++in_other;
    }
#pragma omp barrier
    if (in_critical != 100L * omp_get_num_threads()) ++ordered_wrong;
  }
#pragma omp parallel for reduction(+ : reduced) schedule(dynamic)
  for (int i = 0; i < 1000; ++i) reduced += i;
  std::atomic<int> nested{0};
#pragma omp parallel num_threads(3)
  {
#pragma omp parallel num_threads(3)
    {
      if (omp_get_num_threads() != 1 && omp_get_level() == 2) CHECK(omp_get_active_level() <= 1, "nested");
#pragma omp for schedule(dynamic)
      for (int i = 0; i < 10; ++i) ++nested;
    }
  }
  const int n = threads;
  CHECK(by_static == kSum, "static");
  CHECK(by_dynamic == 20 * kSum, "dynamic");
  CHECK(by_guided == kSum && last == 0, "guided");
  CHECK(by_collapse == kSum, "collapse");
  CHECK(by_runtime == kSum, "runtime");
  CHECK(reduced == kSum, "reduction");
  CHECK(singles == 1 && sections == 111, "single and sections");
  CHECK(copied_sum == 7 * n, "copyprivate");
  CHECK(in_critical == 100L * n && in_other == in_critical && ordered_wrong == 0, "critical");
  CHECK(nested % 10 == 0 && nested >= 10, "nested");
  CHECK(!omp_in_parallel() && omp_get_num_threads() == 1 && omp_get_thread_num() == 0, "outside");
}

[[gnu::noinline]] void fail_at(long i, long at) { CHECK(i != at, "number 17 is out of range"); }

volatile int8_t zero8 = 0;
volatile int16_t zero16 = 0;
volatile int32_t zero32 = 0, minus32 = -1;
volatile int64_t zero64 = 0, minus64 = -1;
volatile uint32_t zerou = 0;
struct Far {
  char padding[300];
  int64_t divisor;
} far_away;

#if defined(__x86_64__)
// Addressing modes that compilers use.
void encodings() {
  int64_t q = 0, r = 0;
  int64_t table[4] = {1, 1, 1, 0};
  Far* const base = &far_away;
#define DIVIDE(operand, ...)                                     \
  q = 5, r = 0;                                                  \
  asm volatile(operand : "+a"(q), "+d"(r) : __VA_ARGS__ : "cc"); \
  if (q != 0 || r != 0) std::abort();
  DIVIDE("idivq %2", "r"(int64_t{0}))
  DIVIDE("idivq 24(%2)", "r"(table))
  DIVIDE("idivq (%2,%3,8)", "r"(table), "r"(int64_t{3}))
  DIVIDE("idivq 300+4(%2)", "r"(base))
  DIVIDE("divq 16(%2,%3,8)", "r"(table), "r"(int64_t{1}))
  register int64_t in_r13 asm("r13") = 0;
  DIVIDE("idivl %k2", "r"(in_r13))
  register int64_t* at_r13 asm("r13") = table + 3;
  DIVIDE("idivq (%2)", "r"(at_r13))
  register int64_t* at_r12 asm("r12") = table + 3;
  DIVIDE("idivq (%2)", "r"(at_r12))
  DIVIDE("divw %w2", "r"(int64_t{0}))
  asm volatile("mov $5, %%eax; mov $0, %%ecx; idivb %%ch; mov %%rax, %0" : "=r"(q) : : "rax", "rcx", "cc");
  if ((q & 0xffff) != 0) std::abort();
}
#else
void encodings() { CHECK(false, "integer division by zero"); }
#endif

}  // namespace

extern "C" void exercise(int what) {
  switch (what) {
    case 1:
      constructs();
      break;
    case 2: {  // the others wait at a barrier
#pragma omp parallel
      {
        fail_at(omp_get_thread_num() == omp_get_num_threads() - 1 ? 17 : 0, 17);
#pragma omp barrier
      }
      break;
    }
    case 3: {
#pragma omp parallel for schedule(dynamic)
      for (int i = 0; i < 1000; ++i) fail_at(i, 17);
      break;
    }
    case 4: {  // the lock is free afterwards
#pragma omp parallel
      {
#pragma omp critical
        fail_at(17, 17);
      }
#pragma omp parallel
      {
#pragma omp critical
        fail_at(0, 17);
      }
      break;
    }
    case 5: {
#pragma omp parallel
      {
#pragma omp single
        fail_at(17, 17);
      }
      break;
    }
    case 6: {  // both regions
#pragma omp parallel num_threads(2)
      {
#pragma omp parallel for
        for (int i = 0; i < 20; ++i) fail_at(i, 17);
        std::abort();
      }
      break;
    }
    case 7: {
#pragma omp parallel
      throw std::runtime_error("no memory for number 17");
      break;
    }
    case 8: {
#pragma omp parallel num_threads(1)
      fail_at(17, 17);
      break;
    }
    case 9: {
      std::atomic<int> sum{0};
#pragma omp parallel for
      for (int i = 0; i < 100; ++i) sum += i == 17 ? i / zero32 : 1;
      break;
    }
    case 10: {
      const long values[] = {17 / zero8, 17 / zero16, 17 / zero32, 17 / zero64, 17u / zerou, 17 % zero32};
      for (const long value : values)
        if (value != 0) std::abort();
      break;
    }
    case 11:
      encodings();
      break;
    case 12:  // no zero: it wraps
      CHECK(static_cast<int32_t>(INT_MIN + (zero32 & 1)) / minus32 == INT_MIN || minus32 != -1, "overflow");
      CHECK((LONG_MIN + zero64) / minus64 == LONG_MIN, "overflow of 64 bits");
      break;
    case 13: {
      int n = 0;
#pragma omp parallel
#pragma omp single
      n = omp_get_num_threads();
      char text[40];
      std::snprintf(text, sizeof text, "threads: %d of %d", n, omp_get_max_threads());
      CHECK(false, text);
      break;
    }
    default:
      break;
  }
}

#ifdef TASKS
extern "C" void tasks() {
#pragma omp task
  zero32 = 0;
#pragma omp taskwait
}
#endif
