/* The part of api.h, which includes it, on updates of patterns: what leaves, what joins, and the
 * new index. The words, and what all functions promise, are explained there. */
#ifndef DYNSPARSE_API_UPDATE_H
#define DYNSPARSE_API_UPDATE_H

/* ---- pattern updates ---- */

/* The pattern (row_ptr [height + 1], cols and slots [nnz]; null slots: entry p is in slot p)
 * without the slots for which leaves [nnz, by slot] is 1, `dropped` of them, and with the flat
 * positions row * width + col of grow [grown], ascending: new_row_ptr [height + 1], and new_cols
 * and source [nnz - dropped + grown]. source is the old slot of an entry that stays; that of the
 * i-th grown one is reused[i], or -1 where reused is null. Heights and widths are in blocks. grow
 * is checked: returns 2 where it is out of order or range, or a position is taken; outputs are then
 * undefined. */
DYNSPARSE_API int dynsparse_pattern_merge(
    const int32_t* row_ptr, const int32_t* cols, const int32_t* slots, int64_t height,
    int64_t width, const uint8_t* leaves, int64_t dropped, const int64_t* grow, int64_t grown,
    const int64_t* reused, int32_t* new_row_ptr, int32_t* new_cols, int32_t* source,
    int32_t threads);

/* The CSC index of a CSR index, with slots as in dynsparse_pattern_merge: col_ptr [width + 1],
 * csc_rows and csc_slots [nnz]. The columns of a row may come in any order. */
DYNSPARSE_API int dynsparse_pattern_by_columns(const int32_t* row_ptr, const int32_t* cols,
                                               const int32_t* slots, int64_t height,
                                               int64_t width, int32_t* col_ptr, int32_t* csc_rows,
                                               int32_t* csc_slots, int32_t threads);

/* The index of a pattern from a file: row_ptr [height + 1], cols [nnz], col_ptr [width + 1]. packed
 * [bytes]: gaps or, with gaps 0, a mask, see src/dynsparse/pattern/packed.py. Returns 2, outputs
 * undefined, where it is not one of nnz blocks of height x width, which is checked. */
DYNSPARSE_API int dynsparse_pattern_unpack(const uint8_t* packed, int64_t bytes, int32_t gaps,
                                           int64_t height, int64_t width, int64_t nnz,
                                           int32_t* row_ptr, int32_t* cols, int32_t* col_ptr);

/* An array follows a pattern update: moved [count], whose entry j is what entry source[j] of data
 * is, or zeros where source[j] is -1. Entries have `bytes` bytes and are aligned as a number of so
 * many bytes where these are 2, 4 or 8. source [count] may be in any order. There is at least one
 * entry in data where `count` is not 0, and any number of slots before the update. */
DYNSPARSE_API void dynsparse_pattern_move(const void* data, int64_t bytes, const int32_t* source,
                                          int64_t count, void* moved, int32_t threads);

/* ---- growth: scores are magnitudes, and NaN marks what can never be chosen ---- */

/* scores [rows, width] = the pooled magnitudes of grad [rows * block, width * block]. pooling 0:
 * sum, 1: mean, 2: largest. block is at most 1024. */
DYNSPARSE_API void dynsparse_grow_pool(const float* grad, int64_t rows, int64_t width,
                                       int64_t block, int32_t pooling, float* scores,
                                       int32_t threads);

/* Returns how many of |scores| [rows, width] exceed the threshold outside the pattern's rows
 * (row_ptr [rows + 1], cols, any order); -1 without scratch memory. Where they fit the room,
 * found_scores and found_flat [room] get them in order, flat positions counted from `offset`;
 * otherwise neither is written. Scores at the pattern are overwritten with NaN. With a negative
 * threshold those that cannot be among the `wanted` largest may be left out. row_ptr need not begin
 * at 0: it may be a part of a longer one, with all of cols. */
DYNSPARSE_API int64_t dynsparse_grow_scan(float* scores, int64_t rows, int64_t width,
                                          const int32_t* row_ptr, const int32_t* cols,
                                          float threshold, int64_t wanted, int64_t offset,
                                          float* found_scores, int64_t* found_flat, int64_t room,
                                          int32_t threads);

/* The positions [k] of the k largest (or, with largest 0, smallest) of scores [count], ascending;
 * among equal scores the smaller positions. 1 <= k <= count; no NaN. */
DYNSPARSE_API int dynsparse_grow_select(const float* scores, int64_t count, int64_t k,
                                        int32_t largest, int64_t* positions, int32_t threads);

/* The k largest of scores [count] and what stands beside them in flat [count] move to the front, in
 * the order they were in; the first of equal ones are chosen. What is behind them is undefined.
 * 1 <= k <= count; no NaN. */
DYNSPARSE_API int dynsparse_grow_compact(float* scores, int64_t* flat, int64_t count, int64_t k,
                                         int32_t threads);

/* keys [count], signed integers in the order of the scores or, with largest 0, in the other; equal
 * for equal scores, 0.0 and -0.0 among them. No NaN. */
DYNSPARSE_API void dynsparse_rank_keys(const float* scores, int64_t count, int32_t largest,
                                       int32_t* keys);

/* counts [2^bits]: how many keys have each digit, of `bits` bits (at most 11) from bit `shift`
 * on of what a key has more than the most negative one. At most 2^31 - 1 keys. */
DYNSPARSE_API void dynsparse_rank_digits(const int32_t* keys, int64_t count, int32_t shift,
                                         int32_t bits, int32_t* counts);

/* found [room]: the keys with one digit, in order; there are exactly `room` of them. */
DYNSPARSE_API void dynsparse_rank_narrow(const int32_t* keys, int64_t count, int32_t shift,
                                         int32_t bits, int32_t digit, int32_t* found,
                                         int64_t room);

/* Where chosen [count], of 0 and 1, is 1: places get these positions, counted from `offset`;
 * returns how many there are. */
DYNSPARSE_API int64_t dynsparse_rank_places(const uint8_t* chosen, int64_t count, int64_t offset,
                                            int64_t* places);

/* Whether dynsparse_grow_screen is there on this machine: 1 or 0. */
DYNSPARSE_API int32_t dynsparse_grow_screens(void);

/* Of the gradient dY^T X, with x [batch, width] and dy [batch, height] and their strides: which
 * positions are sure to exceed `high` in magnitude, and which others may exceed `low`, by products
 * of 16-bit integers, which are off by a bound. Outside the pattern's rows (row_ptr [height + 1],
 * cols, as dynsparse_grow_scan).
 *
 * found [2]: how many of the others there are, and how many of the first. open_counts [height] says
 * how many of the others are in each row, open_cols [open_room] their columns; sure [sure_room] are
 * the flat positions of the first. All ascend. Returns 2, with all of them undefined, where there
 * was too little room; every thread has its share, so that may depend on `threads`. x and dy hold
 * finite numbers below 1e15, 0 < low <= high, and high may be infinity. */
DYNSPARSE_API int dynsparse_grow_screen(
    const float* x, int64_t x_batch_stride, int64_t x_feature_stride, const float* dy,
    int64_t dy_batch_stride, int64_t dy_feature_stride, int64_t batch, int64_t height,
    int64_t width, const int32_t* row_ptr, const int32_t* cols, float low, float high,
    int32_t* open_counts, int32_t* open_cols, int64_t open_room, int64_t* sure, int64_t sure_room,
    int64_t* found, int32_t threads);

#endif
