// Products with sparse inputs: a multiplication for each non-zero of an input and each non-zero of
// the matrix in its column, and none for the other features.

#include "api.h"
#include "base/masks.h"

using dynsparse::i32;
using dynsparse::i64;

namespace {

// Multiplications that another thread is woken for.
constexpr i64 WORTHWHILE = 1 << 14;

}  // namespace

void dynsparse_sparse_input_forward(const i32* x_ptr, const i32* x_cols, const float* x_values,
                                    const float* values, const i32* col_ptr, const i32* rows,
                                    const i32* slots, const float* bias, float* y, i64 batch,
                                    i64 out, i64 block, i32 threads) {
  const i64 area = block * block;
  const bool parallel = batch > 1 && i64(x_ptr[batch]) * out > WORTHWHILE;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4) if (parallel)
  for (i64 sample = 0; sample < batch; sample++) {
    float* row = y + sample * out;
    if (bias)
      std::memcpy(row, bias, out * sizeof(float));
    else
      std::memset(row, 0, out * sizeof(float));
    for (i64 k = x_ptr[sample]; k < x_ptr[sample + 1]; k++) {
      const i64 column = x_cols[k] / block, lane = x_cols[k] % block;
      const float x = x_values[k];
      for (i64 p = col_ptr[column]; p < col_ptr[column + 1]; p++) {
        const float* weight = values + slots[p] * area + lane;
        float* sums = row + rows[p] * block;
        for (i64 r = 0; r < block; r++) sums[r] += x * weight[r * block];
      }
    }
  }
}

void dynsparse_sparse_input_backward(const float* dy, const i32* x_ptr, const i32* x_samples,
                                     const float* x_values, const i32* col_ptr, const i32* rows,
                                     const i32* slots, float* dvalues, i64 out, i64 in, i64 block,
                                     i32 threads) {
  const i64 area = block * block, columns = in / block;
  const bool parallel = i64(x_ptr[in]) * out > WORTHWHILE;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 64) if (parallel)
  for (i64 column = 0; column < columns; column++) {
    if (x_ptr[column * block] == x_ptr[(column + 1) * block]) continue;
    for (i64 p = col_ptr[column]; p < col_ptr[column + 1]; p++) {
      float* gradient = dvalues + slots[p] * area;
      const float* dy_rows = dy + rows[p] * block;
      for (i64 lane = 0; lane < block; lane++) {
        const i64 feature = column * block + lane;
        for (i64 r = 0; r < block; r++) {
          float sum = 0;
          for (i64 k = x_ptr[feature]; k < x_ptr[feature + 1]; k++)
            sum += x_values[k] * dy_rows[i64(x_samples[k]) * out + r];
          gradient[r * block + lane] = sum;
        }
      }
    }
  }
}
