// What lets a library that is compiled on a newer Linux load where the C library is 2.28 and libstdc++ is GCC 8's
// (UNTORCH_MANYLINUX_2_28). It is linked with --wrap for the names in manylinux_2_28.txt: what calls one of them calls
// its function here, which calls the version that those libraries have, or does the work itself.
#include <cxxabi.h>
#include <dlfcn.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <ios>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#if defined(__x86_64__)
#define UNTORCH_GLIBC "GLIBC_2.2.5"
#define UNTORCH_GLIBC_DLINFO "GLIBC_2.3.3"
#define UNTORCH_GLIBC_SETNAME "GLIBC_2.12"
constexpr int kStatVersion = 1;
#elif defined(__aarch64__)
#define UNTORCH_GLIBC "GLIBC_2.17"
#define UNTORCH_GLIBC_DLINFO UNTORCH_GLIBC
#define UNTORCH_GLIBC_SETNAME UNTORCH_GLIBC
constexpr int kStatVersion = 0;
#endif

// `name` by the older version of it.
#define UNTORCH_WRAP(result, name, version, parameters, arguments) \
  result untorch_old_##name parameters;                            \
  asm(".symver untorch_old_" #name "," #name "@" version);         \
  result __wrap_##name parameters { return untorch_old_##name arguments; }

// The names are the linker's.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {

UNTORCH_WRAP(double, exp, UNTORCH_GLIBC, (double x), (x))
UNTORCH_WRAP(double, log, UNTORCH_GLIBC, (double x), (x))
UNTORCH_WRAP(double, pow, UNTORCH_GLIBC, (double x, double y), (x, y))
UNTORCH_WRAP(double, exp2, UNTORCH_GLIBC, (double x), (x))
UNTORCH_WRAP(double, log2, UNTORCH_GLIBC, (double x), (x))
UNTORCH_WRAP(double, fmod, UNTORCH_GLIBC, (double x, double y), (x, y))
UNTORCH_WRAP(float, fmodf, UNTORCH_GLIBC, (float x, float y), (x, y))

UNTORCH_WRAP(int, dladdr, UNTORCH_GLIBC, (const void* address, Dl_info* info), (address, info))
UNTORCH_WRAP(int, dlclose, UNTORCH_GLIBC, (void* library), (library))
UNTORCH_WRAP(char*, dlerror, UNTORCH_GLIBC, (), ())
UNTORCH_WRAP(int, dlinfo, UNTORCH_GLIBC_DLINFO, (void* library, int request, void* info), (library, request, info))
UNTORCH_WRAP(void*, dlopen, UNTORCH_GLIBC, (const char* file, int mode), (file, mode))
UNTORCH_WRAP(void*, dlsym, UNTORCH_GLIBC, (void* library, const char* name), (library, name))

UNTORCH_WRAP(int, pthread_create, UNTORCH_GLIBC,
             (pthread_t * thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument),
             (thread, attributes, body, argument))
UNTORCH_WRAP(void*, pthread_getspecific, UNTORCH_GLIBC, (pthread_key_t key), (key))
UNTORCH_WRAP(int, pthread_setspecific, UNTORCH_GLIBC, (pthread_key_t key, const void* value), (key, value))
UNTORCH_WRAP(int, pthread_key_create, UNTORCH_GLIBC, (pthread_key_t * key, void (*end)(void*)), (key, end))
UNTORCH_WRAP(int, pthread_mutex_trylock, UNTORCH_GLIBC, (pthread_mutex_t * mutex), (mutex))
UNTORCH_WRAP(int, pthread_once, UNTORCH_GLIBC, (pthread_once_t * once, void (*body)()), (once, body))
UNTORCH_WRAP(int, pthread_rwlock_rdlock, UNTORCH_GLIBC, (pthread_rwlock_t * lock), (lock))
UNTORCH_WRAP(int, pthread_rwlock_wrlock, UNTORCH_GLIBC, (pthread_rwlock_t * lock), (lock))
UNTORCH_WRAP(int, pthread_rwlock_tryrdlock, UNTORCH_GLIBC, (pthread_rwlock_t * lock), (lock))
UNTORCH_WRAP(int, pthread_rwlock_trywrlock, UNTORCH_GLIBC, (pthread_rwlock_t * lock), (lock))
UNTORCH_WRAP(int, pthread_rwlock_unlock, UNTORCH_GLIBC, (pthread_rwlock_t * lock), (lock))
UNTORCH_WRAP(int, pthread_setname_np, UNTORCH_GLIBC_SETNAME, (pthread_t thread, const char* name), (thread, name))
UNTORCH_WRAP(int, pthread_sigmask, UNTORCH_GLIBC, (int how, const sigset_t* set, sigset_t* old), (how, set, old))

// 2.30 has it. Until then the wait is for the other clock.
int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const timespec* until) {
  timespec here{}, real{};
  if (clock_gettime(clock, &here) != 0 || clock_gettime(CLOCK_REALTIME, &real) != 0) return EINVAL;
  constexpr std::int64_t kSecond = 1'000'000'000;
  const std::int64_t left = (until->tv_sec - here.tv_sec) * kSecond + until->tv_nsec - here.tv_nsec;
  const std::int64_t at = real.tv_nsec + (left > 0 ? left : 0);
  const timespec then{real.tv_sec + at / kSecond, at % kSecond};
  return pthread_cond_timedwait(condition, mutex, &then);
}

// There were no functions of these names: headers called others.
int untorch_old_xstat(int version, const char* path, struct stat* info);
int untorch_old_fxstat(int version, int file, struct stat* info);
asm(".symver untorch_old_xstat,__xstat@" UNTORCH_GLIBC);
asm(".symver untorch_old_fxstat,__fxstat@" UNTORCH_GLIBC);
int __wrap_stat(const char* path, struct stat* info) { return untorch_old_xstat(kStatVersion, path, info); }
int __wrap_fstat(int file, struct stat* info) { return untorch_old_fxstat(kStatVersion, file, info); }

// Counters of references are atomic, also while there is one thread.
char __wrap___libc_single_threaded = 0;

}  // extern "C"

// Of libstdc++, by the linker's names: objects are passed by their addresses, as members are called.
#define UNTORCH_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
#define UNTORCH_OSTRINGSTREAM "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1E"
#define UNTORCH_STRINGSTREAM "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1E"
#define UNTORCH_STRINGBUF_STR "St7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv"
#define UNTORCH_EXCEPTION_PTR "_ZNSt15__exception_ptr13exception_ptr"

void old_wait(void* condition, void* lock) asm("untorch_old_wait");
asm(".symver untorch_old_wait," UNTORCH_WAIT "@GLIBCXX_3.4.11");
void wait(void* condition, void* lock) asm("__wrap_" UNTORCH_WAIT);
void wait(void* condition, void* lock) { old_wait(condition, lock); }

// Without an argument they were inline.
void old_ostringstream(void* stream, std::ios_base::openmode mode) asm("untorch_old_ostringstream");
asm(".symver untorch_old_ostringstream," UNTORCH_OSTRINGSTREAM "St13_Ios_Openmode@GLIBCXX_3.4.21");
void ostringstream(void* stream) asm("__wrap_" UNTORCH_OSTRINGSTREAM "v");
void ostringstream(void* stream) { old_ostringstream(stream, std::ios_base::out); }
void old_stringstream(void* stream, std::ios_base::openmode mode) asm("untorch_old_stringstream");
asm(".symver untorch_old_stringstream," UNTORCH_STRINGSTREAM "St13_Ios_Openmode@GLIBCXX_3.4.21");
void stringstream(void* stream) asm("__wrap_" UNTORCH_STRINGSTREAM "v");
void stringstream(void* stream) { old_stringstream(stream, std::ios_base::in | std::ios_base::out); }

// One for all buffers became two. That of a buffer which is not used any more copies its text as well.
std::string old_text(const void* buffer) asm("untorch_old_text");
asm(".symver untorch_old_text,_ZNK" UNTORCH_STRINGBUF_STR "@GLIBCXX_3.4.21");
std::string text(const void* buffer) asm("__wrap__ZNKR" UNTORCH_STRINGBUF_STR);
std::string text(const void* buffer) { return old_text(buffer); }
std::string last_text(const void* buffer) asm("__wrap__ZNO" UNTORCH_STRINGBUF_STR);
std::string last_text(const void* buffer) { return old_text(buffer); }

// They were in the constructor and the destructor, which are inline now and may be compiled into this library. The C++
// ABI has these so many bytes before an exception.
constexpr int kCount = 128, kDestructor = 104;
using Destructor = void (*)(void*);
void add_reference(char** exception) asm("__wrap_" UNTORCH_EXCEPTION_PTR "9_M_addrefEv");
void add_reference(char** exception) {
  __atomic_fetch_add(reinterpret_cast<int*>(*exception - kCount), 1, __ATOMIC_ACQ_REL);
}
void release(char** exception) asm("__wrap_" UNTORCH_EXCEPTION_PTR "10_M_releaseEv");
void release(char** exception) {
  if (__atomic_fetch_sub(reinterpret_cast<int*>(*exception - kCount), 1, __ATOMIC_ACQ_REL) != 1) return;
  const Destructor destructor = *reinterpret_cast<Destructor*>(*exception - kDestructor);
  if (destructor != nullptr) destructor(*exception);
  abi::__cxa_free_exception(*exception);
  *exception = nullptr;
}

[[noreturn]] void throw_bad_array_new_length() asm("__wrap__ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// Decimal numbers, as JSON has them.
std::from_chars_result from_chars(const char* first, const char* last, double& value,
                                  std::chars_format) asm("__wrap__ZSt10from_charsPKcS0_RdSt12chars_format");
std::from_chars_result from_chars(const char* first, const char* last, double& value, std::chars_format) {
  static const locale_t c_locale = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string_view given(first, static_cast<std::size_t>(last - first));
  const std::string number(given.substr(0, given.find_first_not_of("0123456789+-.eE")));
  if (number.empty() || number[0] == '+') return {first, std::errc::invalid_argument};
  char* end = nullptr;
  const double found = strtod_l(number.c_str(), &end, c_locale);
  if (end == number.c_str()) return {first, std::errc::invalid_argument};
  const char* const stop = first + (end - number.c_str());
  if (std::isinf(found)) return {stop, std::errc::result_out_of_range};
  value = found;
  return {stop, std::errc()};
}
// NOLINTEND(bugprone-reserved-identifier)
