// Convolutions: both functions against loops in double.

#include "four.h"
#include "pattern.h"

namespace {

// One dimension. Outputs may be fewer than the sizes come to.
struct Side {
  i64 size, kernel, stride, before, dilation, out;

  Side(Random& random, i64 most)
      : size(1 + random.below(most)), kernel(random.among({1, 1, 2, 3, 3, 3, 4, 5, 7})),
        stride(random.among({1, 1, 1, 1, 2, 2, 3, 4, 9})),
        dilation(random.among({1, 1, 1, 2, 3})) {
    const i64 reach = (kernel - 1) * dilation + 1;
    before = random.chance(40) ? reach / 2 : random.below(reach + 2);
    const i64 after = random.chance(40) ? before : random.below(reach + 2);
    size = std::max(size, reach - before - after);
    out = (size + before + after - reach) / stride + 1;
    if (random.chance(10)) out = 1 + random.below(out);
  }
  // The input that output `o` sees through tap k; less than 0 or `size` or more: a zero.
  i64 seen(i64 o, i64 k) const { return o * stride - before + k * dilation; }
};

}  // namespace

void conv_case(const Library& library, Random& random) {
  const i64 block = random.among({1, 1, 1, 1, 1, 2, 3, 4, 5, 7, 8, 11, 16, 16, 24, 32, 64});
  const i64 side = block > 16 || random.chance(60) ? 10 : random.chance(30) ? 80 : 33;
  const Side down(random, side), across(random, side);
  const i64 groups = random.chance(70) ? 1 : 1 + random.below(block == 1 ? 40 : 4);
  const i64 most = std::max<i64>(1, 60 / (block * groups));
  const i64 height = 1 + random.below(most), width = 1 + random.below(most);  // of a group
  const i64 out = groups * height * block, per_group = width * block, in = groups * per_group;
  const i64 work = block * block * std::max(down.out * across.out, down.size * across.size);
  const i64 batch = work > 20000 || random.chance(60)
                        ? 1 + random.below(2)
                        : random.among({3, 4, 8, 15, 16, 17, 24, 33});
  // Entries such that a case takes no more than some milliseconds.
  const i64 room = std::max<i64>(2, 300000 / (work * batch));
  const i64 taps = down.kernel * across.kernel;
  const Index index = make_index(random, groups * height, taps * width, block, room);
  const i64 nnz = index.nnz, b2 = block * block;
  const i64 sizes[] = {batch, in, down.size, across.size, out, down.out, across.out, down.kernel,
                       across.kernel, down.stride, across.stride, down.before, across.before,
                       down.dilation, across.dilation, groups, block};
  Array<i64> shape(random, std::vector<i64>(std::begin(sizes), std::end(sizes)));

  const Four of_x = {batch, in, down.size, across.size}, of_y = {batch, out, down.out, across.out};
  const Tensor x = Tensor::input(random, of_x), dy = Tensor::input(random, of_y);
  Array<float> values(random, nnz * b2), bias(random, out);
  values.fill(random);
  values.freeze();
  bias.fill(random);
  bias.freeze();
  const bool biased = random.chance(50);

  // In double.
  std::vector<double> y(product(of_y)), y_bound(y), dx(product(of_x)), dx_bound(dx), dv(nnz * b2),
      dv_bound(dv);
  const auto number = [](const Four& sizes, const Four& at) {
    return ((at[0] * sizes[1] + at[1]) * sizes[2] + at[2]) * sizes[3] + at[3];
  };
  if (biased)
    each_place(of_y, [&](const Four& at, i64 i) {
      y[i] = bias[at[1]];
      y_bound[i] = std::fabs(y[i]);
    });
  for (i64 slot = 0; slot < nnz * b2; slot++) {
    const i64 p = slot / b2, o = index.row[p] * block + slot % b2 / block;
    const i64 column = index.col[p] * block + slot % block, tap = column / per_group;
    const i64 c = o / (height * block) * per_group + column % per_group;
    const double w = values[slot];
    for (i64 n = 0; n < batch; n++)
      for (i64 i = 0; i < down.out; i++)
        for (i64 j = 0; j < across.out; j++) {
          const i64 r = down.seen(i, tap / across.kernel), s = across.seen(j, tap % across.kernel);
          if (r < 0 || r >= down.size || s < 0 || s >= across.size) continue;
          const Four here = {n, o, i, j}, there = {n, c, r, s};
          const i64 to_y = number(of_y, here), to_x = number(of_x, there);
          const double a = x[there], g = dy[here];
          y[to_y] += w * a;
          y_bound[to_y] += std::fabs(w * a);
          dx[to_x] += w * g;
          dx_bound[to_x] += std::fabs(w * g);
          dv[slot] += g * a;
          dv_bound[slot] += std::fabs(g * a);
        }
  }

  const Four y_strides = random_strides(random, of_y), dx_strides = random_strides(random, of_x);
  struct Result {
    Tensor tensor;
    Array<float> elements, dv;
    // The last bits of dv depend on threads.
    bool operator==(const Result& other) const { return elements == other.elements; }
  };
  run_alike(
      random,
      [&] {
        return std::make_unique<Result>(
            Result{{random, of_y, y_strides}, {random, product(of_y)}, {random, 0}});
      },
      [&](Result& to, i32 threads) {
        expect(library.conv_forward(x.data, x.strides.data(), pointer(values),
                                    index.row_ptr.data(), pointer(index.cols),
                                    biased ? bias.data() : nullptr, to.tensor.data,
                                    y_strides.data(), shape.data(), threads) == 0, "status");
        to.tensor.copy_to(to.elements);
        expect_near(to.elements, y, y_bound, 1e-5, "y of a convolution");
        expect(to.tensor.gaps_are_untouched(), "what lies between the elements of y");
      },
      "y of a convolution depends on threads");

  const bool need_input = random.chance(70), need_values = random.chance(70);
  // What is not read may be null.
  const bool lean = random.chance(50), with_x = need_values || !lean, with_dx = need_input || !lean;
  run_alike(
      random,
      [&] {
        const i64 count = need_input ? product(of_x) : 0;
        return std::make_unique<Result>(Result{{random, of_x, dx_strides},
                                               {random, count},
                                               {random, need_values ? nnz * b2 : 0}});
      },
      [&](Result& to, i32 threads) {
        const float* x_data = need_values ? x.data : nullptr;
        expect(library.conv_backward(dy.data, dy.strides.data(), x_data,
                                     with_x ? x.strides.data() : nullptr,
                                     with_dx ? pointer(values) : nullptr, index.col_ptr.data(),
                                     pointer(index.csc_rows), pointer(index.csc_perm),
                                     need_input ? to.tensor.data : nullptr,
                                     with_dx ? dx_strides.data() : nullptr, pointer(to.dv),
                                     shape.data(), threads) == 0, "status");
        if (need_input) {
          to.tensor.copy_to(to.elements);
          expect_near(to.elements, dx, dx_bound, 1e-5, "dx of a convolution");
          expect(to.tensor.gaps_are_untouched(), "what lies between the elements of dx");
        }
        expect_near(to.dv, dv, dv_bound, 1e-5, "dvalues of a convolution");
      },
      "dx of a convolution depends on threads");
}
