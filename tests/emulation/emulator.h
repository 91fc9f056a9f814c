// Threads of a cluster of CTAs on one CPU thread: each is a fiber that runs until it has to wait, and which of those
// that can run is next, or which load arrives, is drawn at random. A program for tests of custom_ops/cuda; see
// test_emulation.py.
//
// What is checked besides results: that nobody waits for ever, that no barrier gets more arrivals or bytes than it
// expects, that nothing is read before the preceding kernel has ended, that no load goes to a CTA that has left, and
// that memory is touched only where it may be. Where a load is on its way there is 0xff, NaN, until it arrives.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <immintrin.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define threadIdx (emulation::current()->thread)
#define blockIdx (emulation::current()->cta->block)
#define gridDim (emulation::grid)
#define CHECK(condition)                                     \
  do {                                                       \
    if (!(condition)) emulation::fail(#condition, __LINE__); \
  } while (0)

using std::max;
using std::min;

namespace emulation {

struct Index {
  int x, y, z;
};

struct Cta;

// Bytes that a thread copies for itself, or an arrival when all before have come; with neither, the thread wakes.
struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
  uint32_t bytes, barrier;
};

struct Fiber {
  void* stack_pointer;
  char* stack;
  Index thread;
  Cta* cta;
  int warp;
  bool done;
  bool waited;  // for the preceding kernel
  int cluster_arrivals, cluster_waits;
  std::deque<Copy> copies;
  const char* waits_for;
  long detail;
};

// Four 8 x 8 matrices that a warp has asked for, and that are read when the first of them is needed.
struct Matrices {
  uint32_t* registers[32][4];
  uint32_t addresses[32], mark;
};

// Threads that do something together; the last to come does it.
struct Meeting {
  int here = 0;
  std::vector<Fiber*> waiting;
  const void* arguments[128];
};

struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0;  // expected, or negative: they have come before it was said
  int completed = 0;
  std::vector<Fiber*> waiting;
};

struct NamedBarrier {
  int count = 0, arrived = 0;
  std::vector<Fiber*> waiting;
};

// One wgmma, carried out as late as it may be.
struct Product {
  float* d[128];
  const uint32_t* a_registers[128];
  bool from_registers;
  uint64_t a, b;
  int n;
  bool bfloat16;
};

struct Cta {
  uint8_t* memory;
  uint32_t bytes;
  int rank;
  Index block;
  int threads, live, triggers;
  std::map<uint32_t, Barrier> barriers;
  NamedBarrier named[16];
  Meeting warps[16], shuffles[16], matrices[16], reads[16], products[16], warpgroups[4];
  std::vector<Matrices> asked_for[16];
  std::deque<std::vector<Product>> committed[4];
  std::vector<Product> open[4];
};

// A tensor map of ours, kept in the bytes of a CUtensorMap.
struct Map {
  const uint8_t* data;
  int rank, within;  // `within`: a box may not reach beyond dimension 1
  int64_t sizes[4], strides[4];
  int box[4];
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

// Bytes on their way, from a tensor or, with `from`, from the memory of another CTA.
struct Load {
  Cta *source, *target;
  uint32_t to, barrier;
  Map map;
  int64_t at[4];
  uint32_t from;
  int bytes;
};

inline Fiber* volatile running;
inline Cta ctas[8];
inline int cta_count;
inline Index grid;
inline std::vector<Fiber> fibers;
inline std::vector<Fiber*> ready, waiting_for_predecessor, waiting_for_cluster, copying;
inline std::vector<Load> loads;
inline std::mt19937 random_number;
inline bool predecessor_ended, weight_is_constant, x_is_ready, matrices_come_late;
inline bool operands_are_written;  // of every wgmma, all rows
inline int cluster_arrived, cluster_epoch;
inline uint64_t* flags;  // set when the predecessor ends
inline int flag_count;
inline uint64_t nonce;
inline char config[512], place[64];

__attribute__((noinline)) inline Fiber* current() {
  Fiber* fiber = running;
  asm volatile("" : "+r"(fiber)::"memory");
  return fiber;
}
inline int lane() { return current()->thread.x % 32; }

[[noreturn]] inline void fail(const char* what, long a = 0, long b = 0) {
  const Fiber* fiber = running;
  std::printf("FAILED %s (%ld, %ld): %s, %s, thread %d of CTA %d\n", what, a, b, config, place,
              fiber ? fiber->thread.x : -1, fiber && fiber->cta ? fiber->cta->rank : -1);
  std::fflush(stdout);
  _exit(1);
}

void switch_to_scheduler();  // until somebody wakes this fiber

inline void wake(std::vector<Fiber*>& fibers_) {
  for (Fiber* fiber : fibers_) ready.push_back(fiber);
  fibers_.clear();
}

inline void wait_in(std::vector<Fiber*>& list, const char* what, long detail = 0) {
  Fiber* const fiber = current();
  fiber->waits_for = what, fiber->detail = detail;
  list.push_back(fiber);
  switch_to_scheduler();
}

template <typename F>
void meet(Meeting& meeting, int count, int me, const void* argument, F&& together) {
  CHECK(meeting.here < count);
  meeting.arguments[me] = argument;
  if (++meeting.here < count) return wait_in(meeting.waiting, "others", count);
  together(meeting);
  meeting.here = 0;
  wake(meeting.waiting);
}

inline void named_barrier(int id, int count, bool wait) {
  NamedBarrier& barrier = current()->cta->named[id];
  if (barrier.arrived == 0) barrier.count = count;
  CHECK(barrier.count == count);
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    wake(barrier.waiting);
  } else if (wait) {
    wait_in(barrier.waiting, "named barrier", id);
  }
}

// ---- memory that kernels may touch: nothing until the predecessor has ended, but a constant weight ----

struct Region {
  char* pages;
  size_t size;
};
inline std::map<std::string, Region> regions;

inline void* allocate(const std::string& name, size_t bytes) {  // the end is followed by a page that faults
  Region& region = regions[name];
  const size_t size = (bytes + 4095) / 4096 * 4096;
  if (region.pages == nullptr || region.size != size) {
    if (region.pages != nullptr) munmap(region.pages - 4096, region.size + 8192);
    region.pages = static_cast<char*>(mmap(nullptr, size + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) + 4096;
    region.size = size;
  }
  mprotect(region.pages, size, PROT_READ | PROT_WRITE);
  std::memset(region.pages, 0xff, size);
  return region.pages + size - bytes;
}

inline void allow(bool ended) {
  for (auto& [name, region] : regions) {
    const bool always = (name == "weight" && weight_is_constant) || (x_is_ready && name != "statistics" && name != "y");
    const int access = !ended && !always ? PROT_NONE : name == "y" ? PROT_READ | PROT_WRITE : PROT_READ;
    mprotect(region.pages, region.size, access);
  }
}

inline void on_fault(int, siginfo_t* info, void*) {
  const char* const at = static_cast<char*>(info->si_addr);
  static std::string text;
  for (auto& [name, region] : regions)
    if (at >= region.pages - 4096 && at < region.pages + region.size + 4096) text = "access to " + name;
  fail(text.empty() ? "access to unknown memory" : text.c_str(), reinterpret_cast<long>(at), predecessor_ended);
}

// ---- scheduling ----

void arrive_load(size_t index);  // hopper_ptx.cuh
void advance_copies(size_t index);

extern "C" void emulation_switch(void** save, void* to);
asm(".globl emulation_switch\nemulation_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
inline void* scheduler_stack;
inline std::function<void()> kernel;

__attribute__((noinline)) inline void switch_to_scheduler() {
  Fiber* const fiber = running;
  asm volatile("" ::: "memory");
  emulation_switch(&fiber->stack_pointer, scheduler_stack);
  asm volatile("" ::: "memory");
}

extern "C" inline void emulation_fiber() {
  kernel();
  Fiber* const fiber = running;
  fiber->done = true;
  emulation_switch(&fiber->stack_pointer, scheduler_stack);
  std::abort();
}

inline void end_predecessor() {
  predecessor_ended = true;
  allow(true);
  for (int i = 0; flags != nullptr && i < flag_count; ++i)
    if (i != 1) flags[i] = nonce;
  wake(waiting_for_predecessor);
}

[[noreturn]] inline void report_deadlock() {
  std::map<std::string, int> counts;
  for (const Fiber& fiber : fibers) {
    if (fiber.done) continue;
    char text[128];
    std::snprintf(text, sizeof text, "CTA %d warp %d waits for %s %ld", fiber.cta->rank, fiber.warp, fiber.waits_for,
                  fiber.detail);
    ++counts[text];
  }
  for (auto& [text, count] : counts) std::printf("  %s: %d threads\n", text.c_str(), count);
  fail("deadlock");
}

enum class Mode { kLoadsLast, kMixed, kLoadsFirst, kLoadsAtOnce, kPlain };

// Runs one cluster to its end. `garbage`: what is in shared memory before, NaN or small numbers.
inline void run_cluster(int count, int threads, uint32_t bytes, Index first_block, bool ended, bool garbage) {
  static std::vector<char*> stacks;
  constexpr size_t kStack = 128 * 1024;
  cta_count = count;
  fibers.assign(static_cast<size_t>(count * threads), Fiber{});
  for (auto* list : {&ready, &waiting_for_predecessor, &waiting_for_cluster, &copying}) list->clear();
  loads.clear();
  cluster_arrived = cluster_epoch = 0;
  predecessor_ended = ended;
  allow(ended);
  for (int c = 0; c < count; ++c) {
    uint8_t* const memory =
        ctas[c].memory ? ctas[c].memory : static_cast<uint8_t*>(std::aligned_alloc(1024, 300 * 1024));
    ctas[c] = Cta{};
    Cta& cta = ctas[c];
    cta.memory = memory, cta.bytes = bytes, cta.rank = c, cta.threads = cta.live = threads;
    cta.block = {first_block.x + c, first_block.y, first_block.z};
    for (uint32_t i = 0; i < bytes; ++i)
      memory[i] = !garbage ? 0xff : i % 2 ? 0x30 + random_number() % 16 : random_number();
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    if (stacks.size() <= i)
      stacks.push_back(
          static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
    Fiber& fiber = fibers[i];
    fiber.stack = stacks[i], fiber.cta = &ctas[i / threads], fiber.waits_for = "";
    fiber.thread = {static_cast<int>(i % threads), 0, 0}, fiber.warp = fiber.thread.x / 32;
    void** top = reinterpret_cast<void**>(fiber.stack + kStack - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(emulation_fiber);
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    fiber.stack_pointer = top;
    ready.push_back(&fiber);
  }
  const auto mode = static_cast<Mode>(random_number() % 5);
  const unsigned rate = 1u << (random_number() % 8);
  const int starved = static_cast<int>(random_number() % 14) - 2;  // a warp that seldom runs
  for (size_t left = fibers.size(); left > 0;) {
    const size_t coming = loads.size() + copying.size();
    const bool outside = coming > 0 || !predecessor_ended;
    bool event = ready.empty();
    if (mode == Mode::kMixed && outside) event |= random_number() % rate == 0;
    if (mode == Mode::kLoadsFirst && outside) event = true;
    if (mode == Mode::kLoadsAtOnce && coming > 0) event = true;
    if (event) {
      running = nullptr;
      const bool end = coming == 0 ? ready.empty() : mode == Mode::kMixed && random_number() % 16 == 0;
      if (!predecessor_ended && (end || mode == Mode::kLoadsFirst)) {
        end_predecessor();
        continue;
      }
      if (coming > 0) {
        const size_t which = random_number() % coming;
        which < loads.size() ? arrive_load(which) : advance_copies(which - loads.size());
        continue;
      }
      if (ready.empty()) report_deadlock();
    }
    size_t next = random_number() % ready.size();
    for (int tries = 0; tries < 6 && ready[next]->warp == starved; ++tries) next = random_number() % ready.size();
    Fiber* const fiber = ready[next];
    ready[next] = ready.back();
    ready.pop_back();
    running = fiber;
    emulation_switch(&scheduler_stack, fiber->stack_pointer);
    running = nullptr;
    if (!fiber->done) continue;
    --left;
    if (!fiber->copies.empty()) fail("copies that nobody waited for");
    if (--fiber->cta->live == 0)
      for (const Load& load : loads)
        if (load.target == fiber->cta || load.source == fiber->cta) fail("a load from or to a CTA that has left");
  }
  if (!loads.empty()) fail("loads that nobody waited for");
  if (!predecessor_ended) fail("nobody waited for the predecessor");
  for (int c = 0; c < count; ++c) {
    if (ctas[c].triggers == 0) fail("the successor may not start");
    for (auto& [address, barrier] : ctas[c].barriers)
      if (barrier.bytes != 0) fail("a barrier still expects bytes", address, barrier.bytes);
    for (auto& matrices : ctas[c].asked_for)
      if (!matrices.empty()) fail("matrices that nobody needed");
    for (NamedBarrier& barrier : ctas[c].named)
      if (barrier.arrived != 0) fail("a named barrier that not all have reached");
  }
}

}  // namespace emulation

// ---- what CUDA has built in ----

inline void __syncwarp() {
  emulation::Fiber* const fiber = emulation::current();
  emulation::meet(fiber->cta->warps[fiber->warp], 32, emulation::lane(), nullptr, [](emulation::Meeting&) {});
}
inline void __syncthreads() { emulation::named_barrier(0, emulation::current()->cta->threads, true); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  struct Argument {
    float value, result;
    int mask;
  } mine = {value, 0.0f, mask};
  emulation::Fiber* const fiber = emulation::current();
  emulation::meet(fiber->cta->shuffles[fiber->warp], 32, emulation::lane(), &mine, [](emulation::Meeting& meeting) {
    auto of = [&](int lane) { return static_cast<Argument*>(const_cast<void*>(meeting.arguments[lane])); };
    for (int lane = 0; lane < 32; ++lane) of(lane)->result = of(lane ^ of(lane)->mask)->value;
  });
  return *const_cast<volatile float*>(&mine.result);
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at += value;
  return before;
}
