// Compiled with AMX and AVX-512-bf16 for x86-64-v4 only, and called where both are there.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear/bf16/unit_blocks.h"

namespace dynsparse {
namespace {

struct alignas(64) Config {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// The compiler does not know that these registers are loaded from memory: what was stored before
// must be there.
void settle() { __asm__ volatile("" ::: "memory"); }

// A matrix register (Intel says tile) is 16 rows of 64 bytes. Of the registers of a thread, 0 to 3
// are sums, 4 and 5 left operands, 6 and 7 right ones.
class Amx {
 public:
  explicit Amx(i64 depth) {
    Config config = {};
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.row_bytes[t] = t == 4 || t == 5 ? depth * 2 : 64;
      config.rows[t] = t >= 6 ? depth / 2 : SIDE;
    }
    settle();
    _tile_loadconfig(&config);
  }
  ~Amx() { _tile_release(); }

  static bool collides(i64) { return false; }

  static void sums_of(const BlockPass& pass, i64 major, const i32* prepared, const bf16* x,
                      i64 stride, float* sums) {
    settle();
    if (pass.block == SIDE) return narrow_sums(pass, major, prepared, x, stride, sums);
    for (i64 n = 0; n < pass.block; n += 2 * SIDE)
      wide_sums(pass, major, prepared + n * pass.block / 2, x, stride, sums + n);
  }

  static void gradient(i64 block, const float* left, const float* right, i64 side, i64 groups,
                       bool add, float* to) {
    if (block == SIDE) return block_of_16(left, right, groups, add, to);
    for (i64 i = 0; i < block; i += 2 * SIDE)
      for (i64 j = 0; j < block; j += 2 * SIDE)
        square_of_32(left + i / SIDE * side, right + j / SIDE * side, side, groups, add,
                     to + i * block + j, block);
  }

 private:
  // Four sums, 2 by 2: 32 samples by 32 outputs of the major, whose right operands of the
  // first block are at `prepared`.
  static void wide_sums(const BlockPass& pass, i64 major, const i32* prepared, const bf16* x,
                        i64 stride, float* sums) {
    const i64 block = pass.block, half = block / 2;
    zero_sums();
    for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
      const bf16* left = x + pass.idx[p] * block;
      const i32* right = prepared + p * half * block;
      for (i64 k = 0; k < half; k += SIDE, left += DEPTH, right += SIDE * SIDE) {
        _tile_loadd(6, right, 64);
        _tile_loadd(7, right + half * SIDE, 64);
        _tile_loadd(4, left, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + SIDE * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    store_square(sums, block);
  }

  // Four sums, 4 by 1: 64 samples by the outputs of a block of 16.
  static void narrow_sums(const BlockPass& pass, i64 major, const i32* prepared, const bf16* x,
                          i64 stride, float* sums) {
    zero_sums();
    for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
      const bf16* left = x + pass.idx[p] * SIDE;
      _tile_loadd(6, prepared + p * SIDE * SIDE / 2, 64);
      _tile_loadd(4, left, stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, left + SIDE * stride, stride * 2);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, left + 2 * SIDE * stride, stride * 2);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, left + 3 * SIDE * stride, stride * 2);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SIDE * SIDE, 64);
    _tile_stored(2, sums + 2 * SIDE * SIDE, 64);
    _tile_stored(3, sums + 3 * SIDE * SIDE, 64);
  }

  // 32 rows of a block's gradient by 32 columns; its rows are `width` apart.
  static void square_of_32(const float* left, const float* right, i64 side, i64 groups, bool add,
                           float* to, i64 width) {
    if (add) {
      _tile_loadd(0, to, width * 4);
      _tile_loadd(1, to + SIDE, width * 4);
      _tile_loadd(2, to + SIDE * width, width * 4);
      _tile_loadd(3, to + SIDE * width + SIDE, width * 4);
    } else {
      zero_sums();
    }
    for (i64 g = 0; g < groups; g++, left += SIDE * SIDE, right += SIDE * SIDE) {
      _tile_loadd(4, left, 64);
      _tile_loadd(6, right, 64);
      _tile_loadd(7, right + side, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, left + side, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    store_square(to, width);
  }

  static void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // Sums 2 by 2 to rows `width` apart.
  static void store_square(float* to, i64 width) {
    _tile_stored(0, to, width * 4);
    _tile_stored(1, to + SIDE, width * 4);
    _tile_stored(2, to + SIDE * width, width * 4);
    _tile_stored(3, to + SIDE * width + SIDE, width * 4);
  }

  static void block_of_16(const float* left, const float* right, i64 groups, bool add, float* to) {
    if (add)
      _tile_loadd(0, to, 64);
    else
      _tile_zero(0);
    for (i64 g = 0; g < groups; g++, left += SIDE * SIDE, right += SIDE * SIDE) {
      _tile_loadd(4, left, 64);
      _tile_loadd(6, right, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, to, 64);
  }
};

}  // namespace

bool amx_usable() {
  static const bool usable = [] {
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    if (!dots_usable()) return false;  // operands are rounded with AVX-512-bf16
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return usable;
}

bool run_on_amx(const BlockPass& pass) {
  return run_bf16_blocks<Amx>(pass);
}

}  // namespace dynsparse
