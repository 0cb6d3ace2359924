// Drives the kernels of one library with random cases, in memory between guard pages.
//
//   driver LIBRARY --seconds S [--cases N] [--seed K] [--callers T]
//   driver --control NAME      does what a sanitizer must notice, here in the driver
//
// Case i of seed k is always the same. `callers` threads work on cases at the same time.

#include <dlfcn.h>
#include <omp.h>

#include <atomic>
#include <chrono>
#include <iterator>
#include <string>

#include "cases.h"

namespace {

using Clock = std::chrono::steady_clock;

Library load(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) die(dlerror());
  Library library;
  const auto find = [&](const char* name) {
    void* found = dlsym(handle, name);
    if (!found) die(name);
    return found;
  };
#define FUNCTION(name) \
  library.name = reinterpret_cast<decltype(library.name)>(find("dynsparse_" #name));
  FUNCTIONS(FUNCTION)
#undef FUNCTION
  return library;
}

using Case = void (*)(const Library&, Random&);
constexpr Case CASES[] = {linear_case,       linear_case,    linear_case,  linear_case,
                          index_case,        update_case,    growth_case,  conv_case,
                          conv_case,         selection_case, dropout_case, dense_rows_case,
                          sparse_input_case, conv_case,      screen_case,  attention_case,
                          int8_case};

void run_one(const Library& library, uint64_t seed, i64 number) {
  Random random(seed * 1000003 + number);
  if (number % 100 == 99) far_case(library, random);
  else CASES[number % std::size(CASES)](library, random);
}

// ---- what must be noticed ----

volatile i64 beyond = 1;  // so that compilers cannot tell

int control(const std::string& name) {
  Random random(1);
  volatile float sum = 0;
  if (name == "read") {
    const Guarded memory(40, Place::RIGHT);
    sum = static_cast<float*>(memory.data())[9 + beyond];
  } else if (name == "write-before") {
    const Guarded memory(40, Place::LEFT);
    static_cast<float*>(memory.data())[-beyond] = 1;
  } else if (name == "write-beside") {
    const Guarded memory(40, Place::ALIGNED);
    // Past the end, on the same page.
    std::memset(static_cast<char*>(memory.data()) + 40 * beyond, 0, 1);
  } else if (name == "write-frozen") {
    const Array<float> array(random, std::vector<float>(10));
    array[beyond] = 1;
#if defined(__x86_64__)
  } else if (name == "masked") {
    // A masked vector load in which no sanitizer has a hand.
    if (!__builtin_cpu_supports("avx512f")) die("no masked loads on this machine");
    const Guarded memory(40, Place::RIGHT);
    const auto* end = static_cast<float*>(memory.data()) + 10;
    __asm__ volatile("kxnorw %%k1, %%k1, %%k1\n\tvmovups (%0), %%zmm1%{%%k1%}%{z%}"
                     : : "r"(end) : "memory");
#endif
  } else if (name == "overflow") {
    volatile i32 large = 2147483647;
    large = large + static_cast<i32>(beyond);
  } else if (name == "race") {
    static i64 shared = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
      threads.emplace_back([] { for (int i = 0; i < 10000; i++) shared++; });
    for (std::thread& t : threads) t.join();
    sum = static_cast<float>(shared);
  } else if (name == "race-in-parallel") {
    static i64 shared = 0;
#pragma omp parallel for num_threads(4) schedule(static)
    for (i64 i = 0; i < 40000; i++) shared += i;
    sum = static_cast<float>(shared);
  } else if (name == "wrong-result") {
    Array<float> got(random, 1);
    got[0] = 1 + static_cast<float>(beyond);
    expect_near(got, {1.0}, {1.0}, 1e-5, "control");
  } else {
    die("no such control");
  }
  (void)sum;
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() == 2 && words[0] == "--control") return control(words[1]);
  if (words.empty()) die("which library?");
  double seconds = 10;
  i64 cases = i64{1} << 60, seed = 0, callers = 1;
  for (std::size_t i = 1; i + 1 < words.size(); i += 2) {
    if (words[i] == "--seconds") seconds = std::stod(words[i + 1]);
    else if (words[i] == "--cases") cases = std::stoll(words[i + 1]);
    else if (words[i] == "--seed") seed = std::stoll(words[i + 1]);
    else if (words[i] == "--callers") callers = std::stoll(words[i + 1]);
    else die("no such option");
  }
  omp_get_max_threads();  // the library finds the runtime here
  const Library library = load(words[0].c_str());
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<i64> next{0}, done{0};
  std::vector<std::thread> threads;
  for (i64 t = 0; t < callers; t++)
    threads.emplace_back([&] {
      for (i64 i = next++; i < cases && Clock::now() < end; i = next++) {
        run_one(library, seed, i);
        done++;
      }
    });
  for (std::thread& t : threads) t.join();
  library.release_scratch();
  std::printf("%lld cases, %lld callers, masks expand: %d, bfloat16 unit: %d\n",
              static_cast<long long>(done.load()), static_cast<long long>(callers),
              library.masks_expand(), library.bf16_unit());
  return done > 0 ? 0 : 1;
}
