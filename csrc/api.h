/* The C interface of the kernels: every function that a library exports, and what it promises.
 *
 * Words, here and in the kernels:
 *
 *   out, in      features: W is [out, in], x [batch, in], y [batch, out]
 *   block        W's non-zeros are blocks of block x block; 1: single elements
 *   entry, slot  a non-zero: in the order of an index, and among the values, which are by rows
 *   major, minor what an index lists entries by, and what they point to: rows and columns of a CSR
 *                index, columns and rows of a CSC index; in blocks
 *   tile         activations of up to 64 samples, feature by feature: vectors hold samples
 *   line         16 neighbouring features of a sample, a cache line: vectors hold features
 *   word         16 neighbouring columns of a row, one bit each: a bit mask of what is present
 *   strip        neighbouring features that are packed at a time
 *   panel        a stretch of minors whose activations stay in the caches, with the order in which
 *                its entries are worked on
 *   slab         neighbouring rows of W, laid out densely
 *   piece, part  what one thread works on
 *
 * Arrays. `name [a, b]` says that a pointer leads to a * b elements, row by row, contiguous.
 * Pointers are aligned as their type asks and no more. Where there are no elements, a pointer may
 * be null; otherwise only where this is said. Strides are in elements and may be anything, 0 and
 * negative too. Outputs are contiguous; every element is written, and nothing else is. They overlap
 * neither each other nor what is read, except where this is said.
 *
 * The index of a layer. CSR: row_ptr [out / block + 1], cols [nnz]; CSC: col_ptr [in / block + 1],
 * csc_rows [nnz], csc_perm [nnz], the slot of each entry; slots [nnz], that of each entry of the
 * CSR, or null where it is the entry's number. Pointers ascend from 0 to nnz, numbers of rows and
 * columns lie in their range and ascend without repetition inside a row or column, and csc_perm and
 * slots are permutations. values [nnz, block, block] holds W[row * block + i, col * block + j]
 * at (slot, i, j).
 *
 * Not checked: none of this is. Sizes that are negative, an index that is not as above, or pointers
 * that lead to less memory than said, are read and written through. Callers check, once per index.
 *
 * Threads. `threads`, at least 1, is how many of the OpenMP runtime's work on a call; small work is
 * done by the calling thread. Every function may be called from several threads at the same time,
 * also on the same arrays, as long as nobody writes what another reads or writes. Results depend on
 * `threads` only where this is said.
 *
 * Returns. Functions of type int return 0, or 1 where there is no scratch memory: outputs are then
 * undefined. Scratch memory is kept for the next call; see dynsparse_release_scratch.
 */
#ifndef DYNSPARSE_API_H
#define DYNSPARSE_API_H

#include <stdint.h>

#if defined(__GNUC__)
#define DYNSPARSE_API __attribute__((visibility("default")))
#else
#define DYNSPARSE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The upper half of a float. */
typedef struct {
  uint16_t bits;
} dynsparse_bf16;

/* The type of an array that comes as void*. */
enum dynsparse_type { DYNSPARSE_FLOAT32 = 0, DYNSPARSE_BFLOAT16 = 1 };

/* ---- what this build and this machine can do ---- */

/* Whether the instruction set of this build expands bit masks: 1, or 0 where they are read bit by
 * bit, and products of few samples with single elements are slower than the others. */
DYNSPARSE_API int32_t dynsparse_masks_expand(void);

/* What multiplies blocks of 16, 32, 64 and 128 in bfloat16: 2 the processor's matrix units (AMX),
 * 1 its vectors (AVX-512-bf16), 0 nothing, they are widened to float32. The environment variable
 * DYNSPARSE_BF16_UNIT may ask for less, 1 or 0; it is read once, by the first function that asks.
 */
DYNSPARSE_API int32_t dynsparse_bf16_unit(void);

/* ---- memory ---- */

/* Gives scratch memory that no call is using back to the system. */
DYNSPARSE_API void dynsparse_release_scratch(void);

/* Advises large pages for memory that is about to be written for the first time, which makes that
 * faster. data [bytes]: only whole large pages inside it are concerned, and only where the system
 * leaves the choice; contents stay. */
DYNSPARSE_API void dynsparse_pattern_large_pages(void* data, int64_t bytes);

/* ---- sparse linear products ---- */

/* y [batch, out] = x W^T + bias.
 *
 * x: [batch, in] with these strides. row_panels: what dynsparse_panels_make has made of row_ptr and
 * cols, or null; single elements only. bias: [out] or null. block: any that divides out and in. The
 * order of sums, and so their last bits, may depend on `batch`, never on `threads`. */
DYNSPARSE_API int dynsparse_linear_forward(
    const float* x, int64_t x_batch_stride, int64_t x_feature_stride, const float* values,
    const int32_t* row_ptr, const int32_t* cols, const int32_t* slots, const void* row_panels,
    const float* bias, float* y, int64_t batch, int64_t out, int64_t in, int64_t block,
    int32_t threads);

/* dx [batch, in] = dy W, dvalues [nnz, block, block] = dy^T x at W's blocks, and dbias [out], dy
 * summed over the samples. Each may be null and is not computed then. The order of the sums of
 * dbias may depend on `batch` and on what else is computed, never on strides or `threads`.
 *
 * dy: [batch, out], x: [batch, in] with these strides. Without dx, values, col_ptr, csc_rows,
 * csc_perm and col_panels are not read and may be null. row_panels, col_panels: what
 * dynsparse_panels_make has made of the CSR and of the CSC index, or null; single elements only. */
DYNSPARSE_API int dynsparse_linear_backward(
    const float* dy, int64_t dy_batch_stride, int64_t dy_feature_stride, const float* x,
    int64_t x_batch_stride, int64_t x_feature_stride, const float* values, const int32_t* row_ptr,
    const int32_t* cols, const int32_t* slots, const int32_t* col_ptr, const int32_t* csc_rows,
    const int32_t* csc_perm, const void* row_panels, const void* col_panels, float* dx,
    float* dvalues, float* dbias, int64_t batch, int64_t out, int64_t in, int64_t block,
    int32_t threads);

/* As dynsparse_linear_forward for bfloat16 x and y. values are of `values_type` (dynsparse_type);
 * the bias is float32. Sums are float32 and rounded once. Where dynsparse_bf16_unit is not 0,
 * float32 values of blocks of 16, 32, 64 and 128 are rounded to bfloat16 first. */
DYNSPARSE_API int dynsparse_linear_forward_bf16(
    const dynsparse_bf16* x, int64_t x_batch_stride, int64_t x_feature_stride, const void* values,
    int32_t values_type, const int32_t* row_ptr, const int32_t* cols, const int32_t* slots,
    const void* row_panels, const float* bias, dynsparse_bf16* y, int64_t batch, int64_t out,
    int64_t in, int64_t block, int32_t threads);

/* As dynsparse_linear_backward for bfloat16 dy, x and dx. values and dvalues are both of
 * `values_type`, dbias is float32. */
DYNSPARSE_API int dynsparse_linear_backward_bf16(
    const dynsparse_bf16* dy, int64_t dy_batch_stride, int64_t dy_feature_stride,
    const dynsparse_bf16* x, int64_t x_batch_stride, int64_t x_feature_stride, const void* values,
    int32_t values_type, const int32_t* row_ptr, const int32_t* cols, const int32_t* slots,
    const int32_t* col_ptr, const int32_t* csc_rows, const int32_t* csc_perm,
    const void* row_panels, const void* col_panels, dynsparse_bf16* dx, void* dvalues,
    float* dbias, int64_t batch, int64_t out, int64_t in, int64_t block, int32_t threads);

/* y [batch, out] = x W^T + bias, where W[r, c] = scale[r] * values at (r, c), in int8.
 *
 * values: as those of the layer, without `slots`, but blocks whose size is a multiple of 8 are
 * [block / 4, block, 4]: of each four neighbouring columns, the rows one after the other. scale:
 * [out]. row_panels: as for dynsparse_linear_forward. masks: null, or those of single elements
 * where the product goes by them, as it does for few samples. bias: [out] or null. With
 * int8_activations 1, products with blocks of multiples of 8 round the features of each sample to
 * multiples of their largest magnitude / 127, and sum integers; a sample with a feature that is not
 * finite gives NaN. Other blocks are computed as with 0. */
DYNSPARSE_API int dynsparse_int8_forward(const float* x, int64_t x_batch_stride,
                                         int64_t x_feature_stride, const int8_t* values,
                                         const float* scale, const int32_t* row_ptr,
                                         const int32_t* cols, const void* row_panels,
                                         const uint16_t* masks, const float* bias, float* y,
                                         int64_t batch, int64_t out, int64_t in, int64_t block,
                                         int32_t int8_activations, int32_t threads);

/* ---- convolutions ---- */

/* y = the convolution of x with W [out, kernel_h * kernel_w * in / groups], taps outside, + bias.
 *
 * sizes [17]: batch, in, height, width, out, out_height, out_width, kernel_h, kernel_w, stride_h,
 * stride_w, padding at the top, at the left, dilation_h, dilation_w, groups, block. All are at
 * least 1, paddings at least 0; block divides in / groups and out / groups, out_height is at most
 * (height + what padding there is - dilation_h * (kernel_h - 1) - 1) / stride_h + 1, out_width
 * likewise; what lies outside of the image is zero. x [batch, in, height, width], y [batch, out,
 * out_height, out_width], each with four strides, of y such that no two elements share a place.
 * bias: [out] or null. Results do not depend on `threads`. */
DYNSPARSE_API int dynsparse_conv_forward(const float* x, const int64_t* x_strides,
                                         const float* values, const int32_t* row_ptr,
                                         const int32_t* cols, const float* bias, float* y,
                                         const int64_t* y_strides, const int64_t* sizes,
                                         int32_t threads);

/* dx, like x, and dvalues [nnz, block, block], like values: the gradients for dy, like y. Each
 * may be null and is not computed then. Without dx, values and dx_strides are not read and may be
 * null; without dvalues, x and x_strides. The last bits of dvalues depend on `threads`. */
DYNSPARSE_API int dynsparse_conv_backward(const float* dy, const int64_t* dy_strides,
                                          const float* x, const int64_t* x_strides,
                                          const float* values, const int32_t* col_ptr,
                                          const int32_t* csc_rows, const int32_t* csc_perm,
                                          float* dx, const int64_t* dx_strides, float* dvalues,
                                          const int64_t* sizes, int32_t threads);

/* ---- attention at the blocks of a pattern ---- */

/* out = softmax(scale q k^T + bias) v, of `heads` in each of `batch` sequences, where a query sees
 * the keys of its blocks and, if `causal`, none behind its own position; what sees none gets zeros.
 *
 * sizes [8]: batch, heads, queries, keys, features of q and k, features of v and out, block,
 * causal. All but `causal` are at least 1; block divides queries and keys. q, k, v and out are
 * [batch, heads, tokens, features], each with four strides, of out such that no two elements share
 * a place. row_ptr [queries / block + 1], cols: the pattern by rows of blocks, ascending. bias
 * [batch, keys] or null; -infinity for keys that nobody sees. sums [batch, heads, queries]: the
 * logarithm of a query's sum of exponentials, infinity where it sees nothing. Weights are dropped
 * where `kept` is not 0: where the random int32 of `seed`, head and block is below `threshold`,
 * others are multiplied by `kept`. Results do not depend on `threads`. */
DYNSPARSE_API int dynsparse_attention_forward(
    const float* q, const int64_t* q_strides, const float* k, const int64_t* k_strides,
    const float* v, const int64_t* v_strides, const int32_t* row_ptr, const int32_t* cols,
    const float* bias, float* out, const int64_t* out_strides, float* sums, const int64_t* sizes,
    float scale, uint64_t seed, int32_t threshold, float kept, int32_t threads);

/* dq, dk and dv, like q, k and v: the gradients for grad, like out; each may be null and is not
 * computed then. All else as forward was given it, out and sums as it has left them. The last bits
 * of dk and dv depend on `threads`. */
DYNSPARSE_API int dynsparse_attention_backward(
    const float* grad, const int64_t* grad_strides, const float* q, const int64_t* q_strides,
    const float* k, const int64_t* k_strides, const float* v, const int64_t* v_strides,
    const float* out, const int64_t* out_strides, const float* sums, const int32_t* row_ptr,
    const int32_t* cols, const float* bias, float* dq, const int64_t* dq_strides, float* dk,
    const int64_t* dk_strides, float* dv, const int64_t* dv_strides, const int64_t* sizes,
    float scale, uint64_t seed, int32_t threshold, float kept, int32_t threads);

/* ---- an index by panels ---- */

/* The least batch from which a product of single elements is faster by panels, measured; 2^62 where
 * it never is. by_columns: 1 for a CSC index, 0 for a CSR index. */
DYNSPARSE_API int64_t dynsparse_panels_from(int64_t majors, int64_t minors, int64_t entries,
                                            int32_t by_columns);

/* How many minors a panel should have: a multiple of 16, 2^16 at most. By the bytes of a core's
 * first-level cache; 0: those of this machine. */
DYNSPARSE_API int64_t dynsparse_panels_size(int64_t majors, int64_t minors, int64_t entries,
                                            int32_t by_columns, int64_t first_level);

/* Bytes that dynsparse_panels_make writes; lists as there. */
DYNSPARSE_API int64_t dynsparse_panels_bytes(int64_t majors, int64_t minors, int64_t entries,
                                             int64_t size, int32_t lists);

/* Writes an index of single elements by panels to memory [dynsparse_panels_bytes], aligned to 8
 * bytes. Products read it and do not change it; it must not be moved to another process.
 *
 * ptr [majors + 1], idx [entries]: CSR, with lists 0 and order null, or with lists 1 and order
 * [entries] the slot of each entry; CSC, with lists 2 and order [entries] its csc_perm.
 * size: minors per panel, a multiple of 16 of 2^16 at most. Returns 1, with nothing of use written,
 * where the minors of a major do not ascend; this is checked. */
DYNSPARSE_API int dynsparse_panels_make(const int32_t* ptr, const int32_t* idx,
                                        const int32_t* order, int32_t lists, int64_t majors,
                                        int64_t minors, int64_t size, void* memory,
                                        int32_t threads);

/* ---- few samples ---- */

/* masks [out, ceil(in / 16)]: bit c % 16 of word c / 16 says that column c is present. Single
 * elements only. */
DYNSPARSE_API void dynsparse_small_masks(const int32_t* row_ptr, const int32_t* cols,
                                         uint16_t* masks, int64_t out, int64_t in,
                                         int32_t threads);

/* The largest batch for which a product with single elements, in float32 or in int8, goes by masks
 * where no cost model chooses: in onnxruntime, and in int8. 0 if there is none. */
DYNSPARSE_API int64_t dynsparse_small_masks_samples(int64_t nnz, int64_t out, int64_t in,
                                                    int32_t int8);

/* As dynsparse_linear_forward for few samples: any batch is computed, but with more than some dozen
 * slowly. block is 1, 4, 8, 16, 32, 64 or 128. Single elements need masks and no cols, blocks cols
 * and no masks; what is not needed may be null. */
DYNSPARSE_API int dynsparse_small_forward(
    const float* x, int64_t x_batch_stride, int64_t x_feature_stride, const float* values,
    const int32_t* row_ptr, const int32_t* cols, const uint16_t* masks, const float* bias,
    float* y, int64_t batch, int64_t out, int64_t in, int64_t block, int32_t threads);

/* As dynsparse_linear_backward for few samples; block, cols and masks as above. */
DYNSPARSE_API int dynsparse_small_backward(
    const float* dy, int64_t dy_batch_stride, int64_t dy_feature_stride, const float* x,
    int64_t x_batch_stride, int64_t x_feature_stride, const float* values, const int32_t* row_ptr,
    const int32_t* cols, const uint16_t* masks, float* dx, float* dvalues, float* dbias,
    int64_t batch, int64_t out, int64_t in, int64_t block, int32_t threads);

/* ---- rows laid out densely ---- */

/* slab [count * block, in] = block rows `first` to first + count of W. masks: those of all single
 * elements, or null; they are faster where dynsparse_masks_expand, and are not read elsewhere. */
DYNSPARSE_API void dynsparse_rows_to_dense(const float* values, const int32_t* row_ptr,
                                           const int32_t* cols, const uint16_t* masks, float* slab,
                                           int64_t first, int64_t count, int64_t in, int64_t block,
                                           int32_t threads);

/* The reverse: values [nnz, block, block] at the blocks of these rows; those of others stay. */
DYNSPARSE_API void dynsparse_rows_from_dense(const float* slab, const int32_t* row_ptr,
                                             const int32_t* cols, const uint16_t* masks,
                                             float* values, int64_t first, int64_t count,
                                             int64_t in, int64_t block, int32_t threads);

/* ---- sparse inputs ---- */

/* y [batch, out] = x W^T + bias, where x is CSR: x_ptr [batch + 1], x_cols and x_values, in any
 * order within a sample. W is read by columns: col_ptr [in / block + 1], block rows and slots of
 * the entries. bias may be null. */
DYNSPARSE_API void dynsparse_sparse_input_forward(
    const int32_t* x_ptr, const int32_t* x_cols, const float* x_values, const float* values,
    const int32_t* col_ptr, const int32_t* rows, const int32_t* slots, const float* bias, float* y,
    int64_t batch, int64_t out, int64_t block, int32_t threads);

/* dvalues = dy^T x at the blocks of W in columns where x has non-zeros; dvalues is zero before. x
 * is CSC: x_ptr [in + 1], x_samples and x_values. dy [batch, out] is contiguous. */
DYNSPARSE_API void dynsparse_sparse_input_backward(
    const float* dy, const int32_t* x_ptr, const int32_t* x_samples, const float* x_values,
    const int32_t* col_ptr, const int32_t* rows, const int32_t* slots, float* dvalues, int64_t out,
    int64_t in, int64_t block, int32_t threads);

#include "api_update.h"  /* pattern updates and growth */

/* ---- dropout ---- */

/* y [count] = x [count] * scale where the i-th random int32 of `seed` is at least `threshold`,
 * otherwise 0. x may be y. */
DYNSPARSE_API void dynsparse_dropout(const float* x, float* y, int64_t count, uint64_t seed,
                                     int32_t threshold, float scale, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
