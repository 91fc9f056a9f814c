// The wrappers of custom_ops/cuda/hopper_ptx.cuh for emulator.h; its folder comes first on the way to includes.
#pragma once

#include "emulator.h"

namespace onnxfuse::cuda {

using emulation::Barrier;
using emulation::Cta;
using emulation::current;
using emulation::Fiber;
using emulation::Load;
using emulation::Map;
using emulation::Meeting;

constexpr uint32_t kBase = 48;  // of the shared memory, which is not aligned

inline uint8_t* cta_shared() { return current()->cta->memory; }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - cta_shared()) + kBase;
}
inline uint8_t* shared_at(Cta& cta, uint32_t address, uint32_t bytes) {
  CHECK(address >= kBase && address + bytes - kBase <= cta.bytes);
  return cta.memory + (address - kBase);
}
inline uint8_t* shared_at(uint32_t address, uint32_t bytes) { return shared_at(*current()->cta, address, bytes); }

// ---- mbarrier ----
inline Barrier& barrier_at(Cta& cta, uint32_t address) {
  const auto found = cta.barriers.find(address);
  if (found == cta.barriers.end()) emulation::fail("a barrier that was not initialised", address);
  return found->second;
}
inline void settle(Barrier& barrier) {
  CHECK(barrier.pending >= 0 && (barrier.bytes >= 0 || barrier.pending > 0));
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.completed;
  barrier.pending = barrier.count;
  emulation::wake(barrier.waiting);
}
inline void arrive_at(Cta& cta, uint32_t address, uint32_t bytes = 0) {
  Barrier& barrier = barrier_at(cta, address);
  CHECK(barrier.pending > 0 && cta.live > 0);
  barrier.bytes += bytes;
  --barrier.pending;
  settle(barrier);
}
inline void barrier_init(uint32_t address, uint32_t arrivals) {
  Cta& cta = *current()->cta;
  shared_at(address, 8);
  CHECK(address % 8 == 0 && !cta.barriers.count(address));
  Barrier& barrier = cta.barriers[address];
  barrier.count = barrier.pending = static_cast<int>(arrivals);
}
inline void fence_barrier_init() {}
inline void barrier_expect_bytes(uint32_t address, uint32_t bytes) { arrive_at(*current()->cta, address, bytes); }
inline void barrier_arrive(uint32_t address) { arrive_at(*current()->cta, address); }
inline void barrier_arrive_remote(uint32_t address, uint32_t cta) {
  CHECK(static_cast<int>(cta) < emulation::cta_count);
  arrive_at(emulation::ctas[cta], address);
}
inline void barrier_wait(uint32_t address, uint32_t parity) {
  Barrier& barrier = barrier_at(*current()->cta, address);
  while (static_cast<uint32_t>(barrier.completed & 1) == parity)
    emulation::wait_in(barrier.waiting, "barrier", address);
}
inline void named_barrier_sync(int id, int threads) { emulation::named_barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) { emulation::named_barrier(id, threads, false); }

// ---- cluster ----
inline uint32_t cluster_rank() { return static_cast<uint32_t>(current()->cta->rank); }
inline void cluster_arrive_relaxed() {
  __syncwarp();
  Fiber* const fiber = current();
  CHECK(fiber->cluster_arrivals == fiber->cluster_waits);
  ++fiber->cluster_arrivals;
  if (++emulation::cluster_arrived < static_cast<int>(emulation::fibers.size())) return;
  emulation::cluster_arrived = 0;
  ++emulation::cluster_epoch;
  emulation::wake(emulation::waiting_for_cluster);
}
inline void cluster_wait() {
  Fiber* const fiber = current();
  CHECK(fiber->cluster_arrivals == fiber->cluster_waits + 1);
  ++fiber->cluster_waits;
  while (emulation::cluster_epoch < fiber->cluster_waits)
    emulation::wait_in(emulation::waiting_for_cluster, "the cluster");
}
inline void push_to_cta(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, uint32_t cta) {
  CHECK(to % 16 == 0 && from % 16 == 0 && bytes % 16 == 0 && static_cast<int>(cta) < emulation::cta_count);
  Cta& target = emulation::ctas[cta];
  barrier_at(target, barrier);
  std::memset(shared_at(target, to, bytes), 0xff, bytes);
  emulation::loads.push_back({current()->cta, &target, to, barrier, {}, {}, from, static_cast<int>(bytes)});
}

// ---- programmatic dependent launch ----
inline void allow_dependents() { ++current()->cta->triggers; }
inline void wait_for_prerequisites() {
  while (!emulation::predecessor_ended) emulation::wait_in(emulation::waiting_for_predecessor, "the predecessor");
  current()->waited = true;
}
template <bool kOften>
void wait_for_flag(const uint64_t* flag, uint64_t value) {
  CHECK(value == emulation::nonce);
  while (*const_cast<const volatile uint64_t*>(flag) != value) {
    CHECK(!emulation::predecessor_ended);  // all are set then, and cleared only when all have seen them
    emulation::wait_in(emulation::waiting_for_predecessor, "a flag");
  }
  current()->waited = true;
}

// ---- bulk tensor copies ----
constexpr uint64_t kEvictFirst = 1, kEvictNormal = 2, kEvictLast = 3;

inline void prefetch_map(const CUtensorMap&) {}
// `ctas`: a bit for each that gets the box, or 0 for this one.
inline void begin_load(uint32_t to, const CUtensorMap& tensor, uint32_t barrier, const int64_t (&at)[4], bool early,
                       int ctas) {
  Fiber* const fiber = current();
  CHECK(fiber->waited || emulation::x_is_ready || early);
  Map map;
  std::memcpy(&map, &tensor, sizeof map);
  for (int64_t coordinate : at) CHECK(coordinate >= 0);
  CHECK(!map.within || at[1] + map.box[1] <= map.sizes[1]);
  const int bytes = 128 * map.box[1] * map.box[2] * map.box[3];
  for (int rank = 0; rank < emulation::cta_count; ++rank) {
    if (ctas ? !(ctas >> rank & 1) : rank != fiber->cta->rank) continue;
    Cta& target = emulation::ctas[rank];
    CHECK(target.live > 0);
    barrier_at(target, barrier);
    std::memset(shared_at(target, to, bytes), 0xff, bytes);
    emulation::loads.push_back({fiber->cta, &target, to, barrier, map, {at[0], at[1], at[2], at[3]}, 0, bytes});
  }
}
inline void load_2d(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, uint64_t) {
  begin_load(to, map, barrier, {c0, c1, 0, 0}, false, 0);
}
inline void load_2d_multicast(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, uint16_t ctas,
                              uint64_t) {
  begin_load(to, map, barrier, {c0, c1, 0, 0}, false, ctas);
}
inline void load_4d(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3, uint64_t) {
  begin_load(to, map, barrier, {c0, c1, c2, c3}, emulation::weight_is_constant, 0);
}
inline void load_4d_multicast(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3,
                              uint16_t ctas, uint64_t) {
  begin_load(to, map, barrier, {c0, c1, c2, c3}, emulation::weight_is_constant, ctas);
}
// Into L2: what is asked for must exist.
inline void prefetch_4d(const CUtensorMap& tensor, int c0, int c1, int c2, int c3) {
  Map map;
  std::memcpy(&map, &tensor, sizeof map);
  CHECK(current()->waited || emulation::weight_is_constant);
  CHECK(c0 >= 0 && c0 < map.sizes[0] && c1 >= 0 && c2 >= 0 && c2 < map.sizes[2] && c3 >= 0);
}

// ---- copies of a thread's own ----
inline void add_copy(const emulation::Copy& copy) {
  Fiber* const fiber = current();
  if (fiber->copies.empty()) emulation::copying.push_back(fiber);
  fiber->copies.push_back(copy);
}
inline void begin_copy(uint32_t to, const void* from, uint32_t bytes, bool present) {
  CHECK(current()->waited && to % bytes == 0 && reinterpret_cast<uintptr_t>(from) % bytes == 0);
  const volatile uint8_t* const source = static_cast<const volatile uint8_t*>(from);
  (void)source[0], (void)source[bytes - 1];  // must be readable
  std::memset(shared_at(to, bytes), 0xff, bytes);
  add_copy({to, present ? from : nullptr, bytes, 0});
}
inline void copy_16(uint32_t to, const void* from) { begin_copy(to, from, 16, true); }
inline void copy_16_or_zeros(uint32_t to, const void* from, bool present) { begin_copy(to, from, 16, present); }
inline void copy_8(uint32_t to, const void* from) { begin_copy(to, from, 8, true); }
inline void barrier_arrive_after_copies(uint32_t barrier) { add_copy({0, nullptr, 0, barrier}); }
inline void wait_for_copies() {
  if (current()->copies.empty()) return;
  add_copy({0, nullptr, 0, 0});
  current()->waits_for = "its copies";
  emulation::switch_to_scheduler();
  CHECK(current()->copies.empty());
}
inline void fence_async_proxy() {}

// ---- wgmma ----
inline void wgmma_fence() {}
inline uint64_t wgmma_descriptor(uint32_t address) { return address; }
constexpr uint64_t kDescriptorStepK16 = 32;

inline float widened(uint16_t bits, bool bfloat16) {
  if (emulation::operands_are_written && bits == 0xffff) emulation::fail("an operand that nobody has written");
  return bfloat16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : _cvtsh_ss(bits);
}
inline void carry_out(Cta& cta, const emulation::Product& product) {
  static float a[64][16], b[16][256], sums[256];
  auto element = [&](uint64_t base, int row, int k) {
    const uint32_t plain = static_cast<uint32_t>(base) + row * 128 + k * 2;
    uint16_t bits;
    std::memcpy(&bits, shared_at(cta, plain ^ ((plain >> 7 & 7) << 4), 2), 2);
    return widened(bits, product.bfloat16);
  };
  if (product.from_registers) {
    for (int t = 0; t < 128; ++t)
      for (int i = 0; i < 8; ++i)
        a[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][t % 4 * 2 + i % 2 + i / 4 * 8] =
            widened(static_cast<uint16_t>(product.a_registers[t][i / 2] >> (i % 2 * 16)), product.bfloat16);
  } else {
    for (int row = 0; row < 64; ++row)
      for (int k = 0; k < 16; ++k) a[row][k] = element(product.a, row, k);
  }
  for (int row = 0; row < product.n; ++row)
    for (int k = 0; k < 16; ++k) b[k][row] = element(product.b, row, k);
  for (int row = 0; row < 64; ++row) {
    std::memset(sums, 0, sizeof sums);
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < product.n; ++n) sums[n] += a[row][k] * b[k][n];
    for (int n = 0; n < product.n; ++n)
      product.d[row / 16 * 32 + row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 % 2 * 2 + n % 2] += sums[n];
  }
}
template <typename F>
void with_warpgroup(const void* argument, F&& together) {
  Fiber* const fiber = current();
  emulation::meet(fiber->cta->warpgroups[fiber->warp / 4], 128, fiber->thread.x % 128, argument, together);
}
inline void wgmma_commit() {
  Cta& cta = *current()->cta;
  const int group = current()->warp / 4;
  with_warpgroup(nullptr, [&](Meeting&) {
    cta.committed[group].push_back(std::move(cta.open[group]));
    cta.open[group].clear();
  });
}
template <int kPending>
__attribute__((noinline)) void wgmma_wait() {
  Cta& cta = *current()->cta;
  auto& committed = cta.committed[current()->warp / 4];
  with_warpgroup(nullptr, [&](Meeting&) {
    for (; committed.size() > kPending; committed.pop_front())
      for (const auto& product : committed.front()) carry_out(cta, product);
  });
  asm volatile("" ::: "memory");
}
template <typename T, int kColumns>
struct Wgmma {
  struct Operands {
    float* d;
    const uint32_t* a;
  };
  static void add(float* d, const uint32_t* registers, uint64_t a, uint64_t b) {
    Operands mine = {d, registers};
    Cta& cta = *current()->cta;
    const int group = current()->warp / 4;
    with_warpgroup(&mine, [&](Meeting& meeting) {
      emulation::Product product = {};
      for (int t = 0; t < 128; ++t) {
        const auto* theirs = static_cast<const Operands*>(meeting.arguments[t]);
        product.d[t] = theirs->d, product.a_registers[t] = theirs->a;
      }
      product.from_registers = registers != nullptr;
      product.a = a, product.b = b, product.n = kColumns, product.bfloat16 = !std::is_same_v<T, __half>;
      cta.open[group].push_back(product);
    });
  }
  static void issue(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int) { add(d, nullptr, a, b); }
  static void issue(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, int) { add(d, a, 0, b); }
};

template <int>
void raise_registers() {}
template <int>
void lower_registers() {}

// ---- 8x8 matrices between registers and shared memory ----
template <typename F>
void move_matrices(uint32_t address, uint32_t* const (&registers)[4], F&& move) {
  struct Argument {
    uint32_t address;
    uint32_t* registers[4];
  } mine = {address, {registers[0], registers[1], registers[2], registers[3]}};
  CHECK(address % 16 == 0);
  Fiber* const fiber = current();
  emulation::meet(fiber->cta->matrices[fiber->warp], 32, emulation::lane(), &mine, [&](Meeting& meeting) {
    auto of = [&](int lane) { return static_cast<const Argument*>(meeting.arguments[lane]); };
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        move(of(lane)->registers[i], shared_at(*fiber->cta, of(8 * i + lane / 4)->address, 16) + lane % 4 * 4);
  });
  asm volatile("" ::: "memory");
}
inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  move_matrices(address, {&a, &b, &c, &d}, [](const uint32_t* value, uint8_t* at) { std::memcpy(at, value, 4); });
}
// Reads what the warp has asked for, when all its threads are here with the values that they have seen of it, or null.
// Out of line, as registers change behind the compiler's back.
__attribute__((noinline)) inline void read_matrices(const uint32_t* value = nullptr) {
  Fiber* const fiber = current();
  auto& asked_for = fiber->cta->asked_for[fiber->warp];
  if (asked_for.empty()) return;
  emulation::meet(fiber->cta->reads[fiber->warp], 32, emulation::lane(), value, [&](Meeting& meeting) {
    uint32_t marks = 0;
    for (const emulation::Matrices& matrices : asked_for) {
      marks |= matrices.mark;
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i)
          std::memcpy(matrices.registers[lane][i],
                      shared_at(*fiber->cta, matrices.addresses[8 * i + lane / 4], 16) + lane % 4 * 4, 4);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const auto* const seen = static_cast<const uint32_t*>(meeting.arguments[lane]);
      if (seen != nullptr && (*seen & marks) != marks)
        emulation::fail("a value that does not depend on all loads", *seen, marks);
    }
    asked_for.clear();
  });
  asm volatile("" ::: "memory");
}
// `value` has to depend on each of the loads, which have left a bit in its place.
__attribute__((noinline)) inline void wait_for_value(uint32_t value) { read_matrices(&value); }
inline void ask_for_matrices(uint32_t address, uint32_t* const (&registers)[4]) {
  Fiber* const fiber = current();
  emulation::Matrices mine;
  mine.addresses[0] = address;
  for (int i = 0; i < 4; ++i) mine.registers[0][i] = registers[i];
  emulation::meet(fiber->cta->matrices[fiber->warp], 32, emulation::lane(), &mine, [&](Meeting& meeting) {
    auto& asked_for = fiber->cta->asked_for[fiber->warp];
    CHECK(asked_for.size() < 32);
    emulation::Matrices all;
    all.mark = 1u << asked_for.size();
    for (int lane = 0; lane < 32; ++lane) {
      const auto* theirs = static_cast<const emulation::Matrices*>(meeting.arguments[lane]);
      all.addresses[lane] = theirs->addresses[0];
      for (int i = 0; i < 4; ++i)
        all.registers[lane][i] = theirs->registers[0][i], *theirs->registers[0][i] = i == 0 ? all.mark : 0;
    }
    asked_for.push_back(all);
  });
  asm volatile("" ::: "memory");
}
inline void load_matrices(uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  if (emulation::matrices_come_late) return ask_for_matrices(address, {&a, &b, &c, &d});
  move_matrices(address, {&a, &b, &c, &d}, [](uint32_t* value, const uint8_t* at) { std::memcpy(value, at, 4); });
}
inline uint4 load_shared_16(uint32_t address) {
  CHECK(address % 16 == 0);
  uint4 value;
  std::memcpy(&value, shared_at(address, 16), 16);
  return value;
}
inline void store_shared_16(uint32_t address, const uint4& value) {
  CHECK(address % 16 == 0);
  std::memcpy(shared_at(address, 16), &value, 16);
}
inline uint4 load_global_16(const void* p) {
  uint4 value;
  std::memcpy(&value, p, 16);
  return value;
}
inline void store_global_16(void* p, const uint4& value) {
  CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0);
  std::memcpy(p, &value, 16);
}

}  // namespace onnxfuse::cuda

namespace emulation {

inline void arrive_load(size_t index) {
  using namespace onnxfuse::cuda;
  const Load load = loads[index];
  loads[index] = loads.back();
  loads.pop_back();
  CHECK(load.target->live > 0 && load.source->live > 0);
  if (load.from != 0) {
    std::memcpy(shared_at(*load.target, load.to, load.bytes), shared_at(*load.source, load.from, load.bytes),
                load.bytes);
  } else {
    const Map& map = load.map;
    int row = 0;
    for (int d = 0; d < map.box[3]; ++d)
      for (int c = 0; c < map.box[2]; ++c)
        for (int b = 0; b < map.box[1]; ++b, ++row) {
          const int64_t at[4] = {0, load.at[1] + b, load.at[2] + c, load.at[3] + d};
          bool inside = true;
          const uint8_t* source = map.data;
          for (int i = 1; i < 4; ++i) inside &= at[i] < map.sizes[i], source += at[i] * map.strides[i];
          for (int unit = 0; unit < 8; ++unit) {
            const int64_t k = load.at[0] + unit * 8;
            uint8_t values[16] = {};
            if (inside && k < map.sizes[0])
              std::memcpy(values, source + 2 * k, 2 * std::min<int64_t>(8, map.sizes[0] - k));
            const uint32_t plain = load.to + row * 128 + unit * 16;
            std::memcpy(shared_at(*load.target, plain ^ ((plain >> 7 & 7) << 4), 16), values, 16);
          }
        }
  }
  Barrier& barrier = barrier_at(*load.target, load.barrier);
  barrier.bytes -= load.bytes;
  settle(barrier);
}

inline void advance_copies(size_t index) {
  using namespace onnxfuse::cuda;
  Fiber* const fiber = copying[index];
  size_t steps = fiber->copies.size();
  if (random_number() % 4 == 0) steps = 1 + random_number() % steps;
  for (; steps > 0; --steps) {
    const Copy copy = fiber->copies.front();
    fiber->copies.pop_front();
    if (copy.bytes == 0 && copy.barrier == 0) {
      ready.push_back(fiber);
    } else if (copy.bytes == 0) {
      arrive_at(*fiber->cta, copy.barrier);
    } else if (copy.from == nullptr) {
      std::memset(shared_at(*fiber->cta, copy.to, copy.bytes), 0, copy.bytes);
    } else {
      std::memcpy(shared_at(*fiber->cta, copy.to, copy.bytes), copy.from, copy.bytes);
    }
  }
  if (fiber->copies.empty()) copying.erase(copying.begin() + static_cast<long>(index));
}

}  // namespace emulation
