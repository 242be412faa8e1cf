// The fuzzer where libFuzzer is not there: mutates a corpus, keeps inputs that reach new code (GCC's
// -fsanitize-coverage=trace-pc), and stores the input that ends the process. Equal seeds and counts make equal inputs.
//
//   target [--runs N] [--seconds T] [--seed S] [--max-bytes N] [--dictionary FILE] [--artifacts FOLDER] CORPUS...
//
// CORPUS: folders and files. Each file is run first; without --runs and --seconds that is all.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" void __sanitizer_set_death_callback(void (*callback)());
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);
extern "C" [[gnu::weak]] std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                                             unsigned int seed);

namespace {

using Input = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

// Which pairs of program counters came one after the other.
constexpr std::size_t kMapSize = 1 << 16;
std::array<bool, kMapSize> covered;
std::size_t num_covered = 0;
std::uintptr_t previous = 0;

Input current;                  // what is being run
std::string artifact_prefix;    // folder and slash
std::mt19937_64 random_engine;  // NOLINT: seeded in main

std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(random_engine() % n); }

// Called in a dying process: no allocation.
void store_current() {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::uint8_t byte : current) hash = (hash ^ byte) * 0x100000001b3u;
  char path[4096];
  (void)std::snprintf(path, sizeof path, "%scrash-%016llx", artifact_prefix.c_str(),
                      static_cast<unsigned long long>(hash));
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  for (std::size_t done = 0; fd >= 0 && done < current.size();) {
    const ssize_t n = write(fd, current.data() + done, current.size() - done);
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
  }
  if (fd >= 0) close(fd);
  (void)std::fprintf(stderr, "reproducer: %s\n", path);
}

// True when the input reached code that no other one did.
bool run(const Input& input) {
  current = input;
  current.shrink_to_fit();  // so that a read past the end is seen
  const std::size_t before = num_covered;
  previous = 0;
  (void)LLVMFuzzerTestOneInput(current.data(), current.size());
  return num_covered != before;
}

Input read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Lines of name="text" with \xNN, \\ and \"; others are comments.
std::vector<Input> read_dictionary(const std::string& path) {
  std::vector<Input> words;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t open = line.find('"'), close = line.rfind('"');
    if (line.empty() || line[0] == '#' || open >= close) continue;
    Input word;
    for (std::size_t i = open + 1; i < close; ++i) {
      if (line[i] == '\\' && line[i + 1] == 'x' && i + 3 < close) {
        word.push_back(static_cast<std::uint8_t>(std::stoi(line.substr(i + 2, 2), nullptr, 16)));
        i += 3;
      } else {
        i += line[i] == '\\' ? 1 : 0;
        word.push_back(static_cast<std::uint8_t>(line[i]));
      }
    }
    words.push_back(std::move(word));
  }
  return words;
}

struct Options {
  std::uint64_t runs = 0, seed = 1;
  double seconds = 0;
  std::size_t max_bytes = 64 << 10;
  std::vector<Input> dictionary, corpus;
};
Options options;

constexpr std::uint64_t kNumbers[] = {
    0,          1,          2,          7,          8,          0x10,       0x20,       0x3f,   0x40,    0x7f,
    0x80,       0xff,       0x100,      0x3ff,      0x7fff,     0x8000,     0xfff1,     0xffff, 0x10000, 0x7fffffff,
    0x80000000, 0xfffffff0, 0xffffffff, 1ull << 32, 1ull << 40, 1ull << 62, 1ull << 63, ~7ull,  ~0ull};

// One change of `input`, which is not empty.
void change(Input& input, std::size_t max_size) {
  const std::size_t at = below(input.size());
  const std::size_t length = 1 + below(std::min<std::size_t>(input.size() - at, std::size_t{1} << below(12)));
  const auto offset = [](std::size_t i) { return static_cast<std::ptrdiff_t>(i); };
  const auto overwrite = [&](const std::uint8_t* from, std::size_t n) {
    std::memmove(input.data() + at, from, std::min(n, input.size() - at));
  };
  const auto insert = [&](const Input& what) {
    if (input.size() + what.size() <= max_size) input.insert(input.begin() + offset(at), what.begin(), what.end());
  };
  switch (below(10)) {
    case 0:
      input[at] = static_cast<std::uint8_t>(input[at] ^ 1u << below(8));
      break;
    case 1:
      input[at] = static_cast<std::uint8_t>(random_engine());
      break;
    case 2: {  // a number that is at a border, little-endian
      const std::uint64_t number = kNumbers[below(std::size(kNumbers))] + below(3) - 1;
      overwrite(reinterpret_cast<const std::uint8_t*>(&number), std::size_t{1} << below(4));
      break;
    }
    case 3: {  // near the number that is there
      std::uint64_t number = 0;
      const std::size_t width = std::min<std::size_t>(std::size_t{1} << below(4), input.size() - at);
      std::memcpy(&number, input.data() + at, width);
      number += below(65) - 32;
      overwrite(reinterpret_cast<const std::uint8_t*>(&number), width);
      break;
    }
    case 4:
      input.erase(input.begin() + offset(at), input.begin() + offset(at + length));
      break;
    case 5:  // a chunk over another place, or into it
    case 6: {
      const std::size_t from = below(input.size());
      const Input chunk(input.begin() + offset(from),
                        input.begin() + offset(from + std::min(length, input.size() - from)));
      below(2) == 0 ? overwrite(chunk.data(), chunk.size()) : insert(chunk);
      break;
    }
    case 7: {  // a part of another input
      const Input& other = options.corpus[below(options.corpus.size())];
      if (other.empty()) break;
      const std::size_t from = below(2) == 0 ? std::min(at, other.size() - 1) : below(other.size());
      const Input chunk(other.begin() + offset(from),
                        other.begin() + offset(from + std::min(length, other.size() - from)));
      below(2) == 0 ? overwrite(chunk.data(), chunk.size()) : insert(chunk);
      break;
    }
    case 8: {
      if (options.dictionary.empty()) break;
      const Input& word = options.dictionary[below(options.dictionary.size())];
      below(2) == 0 ? overwrite(word.data(), word.size()) : insert(word);
      break;
    }
    default: {
      const Input same(length, below(2) == 0 ? input[at] : static_cast<std::uint8_t>(0));
      below(2) == 0 ? overwrite(same.data(), same.size()) : insert(same);
      break;
    }
  }
}

Input mutate(const Input& from) {
  Input out = from;
  const unsigned seed = static_cast<unsigned>(random_engine());
  const std::size_t size = out.size(), max_size = std::max(options.max_bytes, size);
  out.resize(max_size);
  if (LLVMFuzzerCustomMutator != nullptr) {
    out.resize(LLVMFuzzerCustomMutator(out.data(), size, max_size, seed));
  } else {
    out.resize(LLVMFuzzerMutate(out.data(), size, max_size));
  }
  return out;
}

void read_arguments(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (!name.starts_with("--")) {
      if (std::filesystem::is_directory(name)) {
        std::vector<std::filesystem::path> files;
        for (const auto& entry : std::filesystem::directory_iterator(name)) files.push_back(entry.path());
        std::sort(files.begin(), files.end());
        for (const auto& file : files) options.corpus.push_back(read_file(file));
      } else {
        options.corpus.push_back(read_file(name));
      }
      continue;
    }
    const std::string value = i + 1 < argc ? argv[++i] : "";
    if (name == "--runs") {
      options.runs = std::stoull(value);
    } else if (name == "--seconds") {
      options.seconds = std::stod(value);
    } else if (name == "--seed") {
      options.seed = std::stoull(value);
    } else if (name == "--max-bytes") {
      options.max_bytes = std::stoull(value);
    } else if (name == "--dictionary") {
      options.dictionary = read_dictionary(value);
    } else if (name == "--artifacts") {
      artifact_prefix = value + "/";
    } else {
      (void)std::fprintf(stderr, "unknown option %s\n", name.c_str());
      std::exit(2);
    }
  }
}

}  // namespace

// GCC calls this at every basic block of what is compiled with -fsanitize-coverage=trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  const std::size_t slot = (here ^ here >> 16 ^ previous << 1) % kMapSize;
  previous = here;
  if (!covered[slot]) {
    covered[slot] = true;
    ++num_covered;
  }
}

// As libFuzzer has it, for custom mutators.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size) {
  Input input(data, data + size);
  for (std::size_t n = std::size_t{1} << below(5); n-- > 0;) {
    if (input.empty()) input.push_back(static_cast<std::uint8_t>(random_engine()));
    change(input, max_size);
  }
  if (input.size() > max_size) input.resize(max_size);
  std::copy(input.begin(), input.end(), data);
  return input.size();
}

int main(int argc, char** argv) {
  read_arguments(argc, argv);
  random_engine.seed(options.seed);
  __sanitizer_set_death_callback(store_current);
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  if (options.corpus.empty()) options.corpus.push_back({});
  std::uint64_t count = 0;
  for (const Input& input : options.corpus) {
    (void)run(input);
    ++count;
  }
  while ((options.runs != 0 && count < options.runs) || (options.seconds > 0 && seconds() < options.seconds)) {
    for (int i = 0; i < 64; ++i, ++count) {
      Input input = mutate(options.corpus[below(options.corpus.size())]);
      if (run(input) && options.corpus.size() < 20000) options.corpus.push_back(std::move(input));
    }
  }
  std::printf("inputs %llu seconds %.1f corpus %zu covered %zu\n", static_cast<unsigned long long>(count), seconds(),
              options.corpus.size(), num_covered);
  return 0;
}
