// Products: every kernel against sums in double, from several threads at a time.

#include <numeric>

#include "pattern.h"

namespace {

// Sizes in blocks such that a case takes no more than some milliseconds.
Index random_index(Random& random, i64 block) {
  const i64 most = std::max<i64>(4, 20000 / (block * block));
  const i64 side = block == 1 ? 300 : std::max<i64>(3, 600 / block);
  i64 height = 1 + random.below(side), width = 1 + random.below(side);
  if (random.chance(10)) height = 1 + random.below(3);
  if (random.chance(10)) width = 1 + random.below(3);
  // So wide that tiles get narrower and panels many.
  if (block == 1 && random.chance(6))
    (random.chance(50) ? height : width) = 5000 + random.below(30000);
  return make_index(random, height, width, block, most);
}

i64 random_batch(Random& random, i64 most) {
  const i64 batch = random.chance(50) ? random.below(20)
                    : random.chance(60) ? random.among({31, 32, 33, 63, 64, 65, 127, 129, 256, 300})
                                        : random.below(600);
  return std::min(batch, most);
}

Array<uint8_t> panels_of(const Library& library, Random& random, i64 majors, i64 minors,
                         const Array<i32>& ptr, const Array<i32>& idx, const i32* order,
                         i32 lists, i32 threads) {
  const i64 first_level = random.among({0, 1 << 14, 48 << 10, 1 << 17});
  const i64 size = random.chance(30)
                       ? 16 * (1 + random.below(40))
                       : library.panels_size(majors, minors, idx.size(), lists == 2,
                                             first_level);
  expect(size > 0 && size % 16 == 0 && size <= 1 << 16, "panels of any cache's size");
  const i64 bytes = library.panels_bytes(majors, minors, idx.size(), size, lists);
  Array<uint8_t> memory(random, bytes / 8 * 8 == bytes ? bytes : bytes + 8);
  expect(library.panels_make(ptr.data(), idx.data(), order, lists, majors, minors, size,
                             memory.data(), threads) == 0, "panels of an ordered index");
  memory.freeze();
  return memory;
}

template <class A, class V>  // types of the activations and of the values
void products(const Library& library, Random& random, i64 block, bool few) {
  constexpr bool BF16 = sizeof(A) == 2, ROUNDS = sizeof(V) == 2;
  const Index index = random_index(random, block);
  const i64 out = index.out, in = index.in, nnz = index.nnz, b2 = block * block;
  const i64 most = std::max<i64>(1, 400000 / (nnz * b2 + out + in));
  const i64 batch = random_batch(random, few ? std::min<i64>(most, 20) : most);
  const auto x = Strided<A>::random(random, batch, in), dy = Strided<A>::random(random, batch, out);
  Array<V> values(random, nnz * b2);
  values.fill(random);
  values.freeze();
  Array<float> bias(random, out);
  bias.fill(random);
  bias.freeze();
  const bool biased = random.chance(50), by_panels = block == 1 && !few && random.chance(60);
  // Values in the order of the rows, or in slots of any order.
  const bool shuffled = !few && random.chance(50);
  std::vector<i32> order(nnz), by_column(index.csc_perm.data(), index.csc_perm.data() + nnz);
  std::iota(order.begin(), order.end(), 0);
  if (shuffled) {
    for (i64 p = nnz - 1; p > 0; p--) std::swap(order[p], order[random.below(p + 1)]);
    for (i32& entry : by_column) entry = order[entry];
  }
  Array<i32> all_slots(random, order), csc_perm(random, by_column);
  all_slots.freeze();
  csc_perm.freeze();
  const i32* slots = shuffled ? all_slots.data() : nullptr;
  Array<uint8_t> row_panels(random, 0), col_panels(random, 0);
  if (by_panels) {
    row_panels = panels_of(library, random, out, in, index.row_ptr, index.cols, slots,
                           slots != nullptr, 2);
    col_panels = panels_of(library, random, in, out, index.col_ptr, index.csc_rows,
                           csc_perm.data(), 2, 2);
  }
  const void* by_rows = by_panels ? row_panels.data() : nullptr;
  const void* by_cols = by_panels && random.chance(80) ? col_panels.data() : nullptr;
  Array<uint16_t> masks(random, few && block == 1 ? out * ((in + 15) / 16) : 0);
  if (masks.size()) {
    library.small_masks(index.row_ptr.data(), index.cols.data(), masks.data(), out, in, 3);
    masks.freeze();
  }

  // In double.
  std::vector<double> y(batch * out), y_bound(y), dx(batch * in), dx_bound(dx), dv(nnz * b2),
      dv_bound(dv);
  for (i64 s = 0; s < batch; s++)
    for (i64 o = 0; o < out; o++) {
      y[s * out + o] = biased ? bias[o] : 0;
      y_bound[s * out + o] = std::fabs(y[s * out + o]);
    }
  for (i64 p = 0; p < nnz; p++)
    for (i64 i = 0; i < block; i++)
      for (i64 j = 0; j < block; j++) {
        const i64 slot = (order[p] * block + i) * block + j;
        const i64 o = index.row[p] * block + i, c = index.col[p] * block + j;
        const double w = number_of(values[slot]);
        for (i64 s = 0; s < batch; s++) {
          const double a = number_of(x.at(s, c)), g = number_of(dy.at(s, o));
          y[s * out + o] += w * a;
          y_bound[s * out + o] += std::fabs(w * a);
          dx[s * in + c] += w * g;
          dx_bound[s * in + c] += std::fabs(w * g);
          dv[slot] += g * a;
          dv_bound[slot] += std::fabs(g * a);
        }
      }

  run_alike(
      random, [&] { return std::make_unique<Array<A>>(random, batch * out); },
      [&](const Array<A>& to, i32 threads) {
        int status;
        const float* b = biased ? bias.data() : nullptr;
        if constexpr (BF16)
          status = library.linear_forward_bf16(
              x.data, x.batch_stride, x.feature_stride, values.data(), ROUNDS,
              index.row_ptr.data(), index.cols.data(), slots, by_rows, b, to.data(), batch, out, in,
              block, threads);
        else if (few)
          status = library.small_forward(
              x.data, x.batch_stride, x.feature_stride, values.data(), index.row_ptr.data(),
              block == 1 ? nullptr : index.cols.data(), block == 1 ? masks.data() : nullptr, b,
              to.data(), batch, out, in, block, threads);
        else
          status = library.linear_forward(
              x.data, x.batch_stride, x.feature_stride, values.data(), index.row_ptr.data(),
              index.cols.data(), slots, by_rows, b, to.data(), batch, out, in, block, threads);
        expect(status == 0, "status");
        expect_near(to, y, y_bound, BF16 ? 1.0 / 128 : 1e-5, "y");
      },
      "y depends on threads");

  std::vector<double> db(out), db_bound(out);
  for (i64 s = 0; s < batch; s++)
    for (i64 o = 0; o < out; o++) {
      db[o] += number_of(dy.at(s, o));
      db_bound[o] += std::fabs(number_of(dy.at(s, o)));
    }

  const int wanted = 1 + random.below(7);
  struct Gradients {
    Array<A> dx;
    Array<V> dv;
    Array<float> db;
    bool operator==(const Gradients& other) const {
      return dx == other.dx && dv == other.dv && db == other.db;
    }
  };
  run_alike(
      random,
      [&] {
        return std::make_unique<Gradients>(Gradients{{random, wanted & 1 ? batch * in : 0},
                                                     {random, wanted & 2 ? nnz * b2 : 0},
                                                     {random, wanted & 4 ? out : 0}});
      },
      [&](const Gradients& to, i32 threads) {
        A* dx_data = wanted & 1 ? to.dx.data() : nullptr;
        V* dv_data = wanted & 2 ? to.dv.data() : nullptr;
        float* db_data = wanted & 4 ? to.db.data() : nullptr;
        const bool lone = !(wanted & 1);  // then these may be null
        int status;
        if constexpr (BF16)
          status = library.linear_backward_bf16(
              dy.data, dy.batch_stride, dy.feature_stride, x.data, x.batch_stride, x.feature_stride,
              lone ? nullptr : values.data(), ROUNDS, index.row_ptr.data(), index.cols.data(), slots,
              lone ? nullptr : index.col_ptr.data(), lone ? nullptr : index.csc_rows.data(),
              lone ? nullptr : csc_perm.data(), by_rows, lone ? nullptr : by_cols, dx_data,
              dv_data, db_data, batch, out, in, block, threads);
        else if (few)
          status = library.small_backward(
              dy.data, dy.batch_stride, dy.feature_stride, x.data, x.batch_stride, x.feature_stride,
              values.data(), index.row_ptr.data(), block == 1 ? nullptr : index.cols.data(),
              block == 1 ? masks.data() : nullptr, dx_data, dv_data, db_data, batch, out, in, block,
              threads);
        else
          status = library.linear_backward(
              dy.data, dy.batch_stride, dy.feature_stride, x.data, x.batch_stride, x.feature_stride,
              lone ? nullptr : values.data(), index.row_ptr.data(), index.cols.data(), slots,
              lone ? nullptr : index.col_ptr.data(), lone ? nullptr : index.csc_rows.data(),
              lone ? nullptr : csc_perm.data(), by_rows, lone ? nullptr : by_cols, dx_data,
              dv_data, db_data, batch, out, in, block, threads);
        expect(status == 0, "status");
        if (dx_data) expect_near(to.dx, dx, dx_bound, BF16 ? 1.0 / 128 : 1e-5, "dx");
        if (dv_data) expect_near(to.dv, dv, dv_bound, ROUNDS ? 1.0 / 128 : 1e-5, "dvalues");
        if (db_data) expect_near(to.db, db, db_bound, 1e-5, "dbias");
      },
      "gradients depend on threads");
}

}  // namespace

void linear_case(const Library& library, Random& random) {
  const i64 block = random.among({1, 1, 1, 1, 2, 3, 4, 5, 7, 8, 11, 16, 16, 24, 32, 32, 48, 64,
                                   64, 128});
  switch (random.below(4)) {
    case 0: return products<dynsparse_bf16, dynsparse_bf16>(library, random, block, false);
    case 1: return products<dynsparse_bf16, float>(library, random, block, false);
    case 2:
      return products<float, float>(library, random, random.among({1, 1, 4, 8, 16, 32, 64, 128}),
                                    true);
    default: return products<float, float>(library, random, block, false);
  }
}

void int8_case(const Library& library, Random& random) {
  const i64 block = random.among({1, 1, 2, 3, 4, 4, 5, 8, 12, 16, 16, 20, 24, 32, 64, 128});
  const Index index = random_index(random, block);
  const i64 out = index.out, in = index.in, nnz = index.nnz, b2 = block * block;
  const i64 most = std::max<i64>(1, 400000 / (nnz * b2 + out + in));
  const i64 batch = random_batch(random, most);
  const auto x = Strided<float>::random(random, batch, in);
  const bool quads = block % 8 == 0, rounds = random.chance(50);
  Array<int8_t> values(random, nnz * b2);
  for (i64 i = 0; i < values.size(); i++) values[i] = static_cast<int8_t>(random.below(256) - 128);
  values.freeze();
  Array<float> scale(random, out), bias(random, out);
  scale.fill(random);
  scale.freeze();
  bias.fill(random);
  bias.freeze();
  const bool biased = random.chance(50);
  Array<uint16_t> masks(random, block == 1 ? out * ((in + 15) / 16) : 0);
  if (block == 1)
    library.small_masks(index.row_ptr.data(), index.cols.data(), masks.data(), out, in, 2);
  const uint16_t* with = block == 1 && random.chance(60) ? masks.data() : nullptr;
  const bool by_panels = block == 1 && random.chance(60);
  Array<uint8_t> row_panels(random, 0);
  if (by_panels)
    row_panels = panels_of(library, random, out, in, index.row_ptr, index.cols, nullptr, 0, 2);

  std::vector<double> y(batch * out), y_bound(y);
  std::vector<double> step(batch);  // half of it is what rounding takes, and a little more
  for (i64 s = 0; s < batch; s++) {
    for (i64 c = 0; c < in; c++)
      step[s] = std::max(step[s], std::fabs(static_cast<double>(x.at(s, c))) / 127);
    for (i64 o = 0; o < out; o++) {
      y[s * out + o] = biased ? bias[o] : 0;
      y_bound[s * out + o] = 1e-5 * std::fabs(y[s * out + o]);
    }
  }
  for (i64 p = 0; p < nnz; p++)
    for (i64 i = 0; i < block; i++)
      for (i64 j = 0; j < block; j++) {
        const i64 at = quads ? (j / 4 * block + i) * 4 + j % 4 : i * block + j;
        const i64 o = index.row[p] * block + i, c = index.col[p] * block + j;
        const double w = values[p * b2 + at] * static_cast<double>(scale[o]);
        for (i64 s = 0; s < batch; s++) {
          y[s * out + o] += w * x.at(s, c);
          const double off = quads && rounds ? 0.501 * step[s] : 0;
          y_bound[s * out + o] += std::fabs(w) * (off + 1e-5 * std::fabs(x.at(s, c)));
        }
      }
  run_alike(
      random, [&] { return std::make_unique<Array<float>>(random, batch * out); },
      [&](const Array<float>& to, i32 threads) {
        const int status = library.int8_forward(
            x.data, x.batch_stride, x.feature_stride, values.data(), scale.data(),
            index.row_ptr.data(), index.cols.data(), by_panels ? row_panels.data() : nullptr, with,
            biased ? bias.data() : nullptr, to.data(), batch, out, in, block, rounds, threads);
        expect(status == 0, "status");
        expect_near(to, y, y_bound, 1, "y of int8 weights");
      },
      "y of int8 weights depends on threads");
}

void dense_rows_case(const Library& library, Random& random) {
  const i64 block = random.among({1, 1, 2, 4, 5, 8, 16, 32, 33, 64});
  const Index index = random_index(random, block);
  const i64 height = index.out / block, in = index.in, b2 = block * block;
  const i64 first = random.below(height), most = 2000000 / (in * block) + 1;
  const i64 count = random.below(std::min(height - first, most) + 1);
  Array<float> values(random, index.nnz * b2), slab(random, count * block * in);
  values.fill(random);
  Array<uint16_t> masks(random, block == 1 ? index.out * ((in + 15) / 16) : 0);
  const bool masked = block == 1 && random.chance(60);
  if (block == 1)
    library.small_masks(index.row_ptr.data(), index.cols.data(), masks.data(), index.out, in, 2);
  const uint16_t* with = masked ? masks.data() : nullptr;
  const i32 threads = 1 + random.below(5);
  library.rows_to_dense(values.data(), index.row_ptr.data(), index.cols.data(), with, slab.data(),
                        first, count, in, block, threads);
  std::vector<float> wanted(slab.size());
  for (i64 p = index.row_ptr[first]; p < index.row_ptr[first + count]; p++)
    for (i64 i = 0; i < b2; i++)
      wanted[((index.row[p] - first) * block + i / block) * in + index.col[p] * block + i % block] =
          values[p * b2 + i];
  expect(std::equal(wanted.begin(), wanted.end(), slab.data()), "rows laid out densely");
  Array<float> back(random, index.nnz * b2);
  std::fill(back.data(), back.data() + back.size(), 7.0f);
  library.rows_from_dense(slab.data(), index.row_ptr.data(), index.cols.data(), with, back.data(),
                          first, count, in, block, threads);
  for (i64 p = 0; p < index.nnz; p++) {
    const bool inside = index.row[p] >= first && index.row[p] < first + count;
    for (i64 i = p * b2; i < (p + 1) * b2; i++)
      expect(back[i] == (inside ? values[i] : 7.0f), "values from dense rows");
  }
}

void sparse_input_case(const Library& library, Random& random) {
  const i64 block = random.among({1, 1, 1, 2, 4, 16}), b2 = block * block;
  const Index index = random_index(random, block);
  const i64 batch = random.below(12), in = index.in, out = index.out;
  // The non-zeros of x, by samples and by features.
  std::vector<std::vector<std::pair<i64, float>>> by_sample(batch), by_feature(in);
  i64 count = 0;
  for (i64 sample = 0; sample < batch; sample++)
    for (i64 n = random.below(20); n > 0; n--, count++) {
      const i64 feature = random.below(in);
      const float x = random.number();
      by_sample[sample].emplace_back(feature, x);
      by_feature[feature].emplace_back(sample, x);
    }
  const auto compress = [&](const auto& lists, Array<i32>& ptr, Array<i32>& at, Array<float>& x) {
    i64 k = ptr[0] = 0;
    for (size_t i = 0; i < lists.size(); i++) {
      for (const auto& [place, value] : lists[i]) at[k] = static_cast<i32>(place), x[k++] = value;
      ptr[i + 1] = static_cast<i32>(k);
    }
  };
  Array<i32> x_ptr(random, batch + 1), x_cols(random, count), t_ptr(random, in + 1),
      samples(random, count);
  Array<float> x_values(random, count), t_values(random, count), values(random, index.nnz * b2),
      y(random, batch * out), dy(random, batch * out), dvalues(random, index.nnz * b2);
  compress(by_sample, x_ptr, x_cols, x_values);
  compress(by_feature, t_ptr, samples, t_values);
  values.fill(random);
  dy.fill(random);
  std::fill(dvalues.data(), dvalues.data() + dvalues.size(), 0.0f);
  const i32 threads = 1 + random.below(5);
  library.sparse_input_forward(x_ptr.data(), x_cols.data(), x_values.data(), values.data(),
                               index.col_ptr.data(), index.csc_rows.data(), index.csc_perm.data(),
                               nullptr, y.data(), batch, out, block, threads);
  library.sparse_input_backward(dy.data(), t_ptr.data(), samples.data(), t_values.data(),
                                index.col_ptr.data(), index.csc_rows.data(),
                                index.csc_perm.data(), dvalues.data(), out, in, block, threads);
  std::vector<double> wanted_y(batch * out), wanted_dv(index.nnz * b2),
      bound_y(batch * out, 100.0), bound_dv(index.nnz * b2, 100.0);
  for (i64 sample = 0; sample < batch; sample++)
    for (const auto& [feature, x] : by_sample[sample])
      for (i64 p = 0; p < index.nnz; p++)
        if (index.col[p] == feature / block)
          for (i64 r = 0; r < block; r++) {
            const i64 at = p * b2 + r * block + feature % block;
            const i64 place = sample * out + index.row[p] * block + r;
            wanted_y[place] += double{x} * values[at];
            wanted_dv[at] += double{x} * dy[place];
          }
  expect_near(y, wanted_y, bound_y, 1e-5, "y of sparse inputs");
  expect_near(dvalues, wanted_dv, bound_dv, 1e-5, "dvalues of sparse inputs");
}

// Strides and sizes near and past 2^31, of which little is touched.
void far_case(const Library& library, Random& random) {
  const i64 in = 1 + random.below(40), out = 1 + random.below(40), batch = 2 + random.below(3);
  const i64 stride = (i64{1} << 30) + random.below(100);
  const Index index = make_index(random, out, in, 1, in * out);
  Array<float> far(random, (batch - 1) * stride + in), y(random, batch * out),
      values(random, index.nnz), dx(random, batch * in), dv(random, index.nnz);
  values.fill(random);
  for (i64 s = 0; s < batch; s++)
    for (i64 f = 0; f < in; f++) far[s * stride + f] = random.number();
  const auto dy = Strided<float>::random(random, batch, out);
  std::vector<double> wanted(batch * out), bound(batch * out, 1000.0);
  for (i64 p = 0; p < index.nnz; p++)
    for (i64 s = 0; s < batch; s++)
      wanted[s * out + index.row[p]] += values[p] * far[s * stride + index.col[p]];
  expect(library.linear_forward(far.data(), stride, 1, values.data(), index.row_ptr.data(),
                                index.cols.data(), nullptr, nullptr, nullptr, y.data(), batch, out,
                                in, 1, 2) == 0, "status");
  expect_near(y, wanted, bound, 1e-5, "far y");
  expect(library.linear_backward(dy.data, dy.batch_stride, dy.feature_stride, far.data(), stride, 1,
                                 values.data(), index.row_ptr.data(), index.cols.data(), nullptr,
                                 index.col_ptr.data(), index.csc_rows.data(),
                                 index.csc_perm.data(), nullptr, nullptr, dx.data(), dv.data(),
                                 nullptr, batch, out, in, 1, 2) == 0, "status");
}
