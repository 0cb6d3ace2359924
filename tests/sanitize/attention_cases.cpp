// Attention at the blocks of a pattern: both functions against loops in double.

#include "four.h"
#include "pattern.h"

void attention_case(const Library& library, Random& random) {
  const i64 block = random.among({1, 1, 2, 3, 4, 5, 8, 11, 16, 16, 17, 24, 32, 64});
  const i64 most = std::max<i64>(1, 70 / block);
  const i64 height = 1 + random.below(most), width = 1 + random.below(most);
  const i64 queries = height * block, keys = width * block;
  const i64 features = random.among({1, 2, 3, 7, 8, 15, 16, 17, 20, 32, 33});
  const i64 outputs = random.chance(50) ? features : random.among({1, 3, 16, 19, 32});
  const i64 batch = 1 + random.below(3), heads = 1 + random.below(3);
  const i64 work = block * block * (features + outputs) * batch * heads;
  const Index index = make_index(random, height, width, block, std::max<i64>(2, 100000 / work));
  const bool causal = random.chance(40), biased = random.chance(40);
  const float infinity = std::numeric_limits<float>::infinity();
  const float scale = 0.25f * (1 + random.below(3)), kept = random.chance(30) ? 1.25f : 0;
  const i64 shape[] = {batch, heads, queries, keys, features, outputs, block, causal};
  const Array<i64> sizes(random, std::vector<i64>(std::begin(shape), std::end(shape)));
  const uint64_t seed = random.engine();
  const i32 threshold = std::numeric_limits<i32>::min() + (i32{1} << 29);

  const Four of_q = {batch, heads, queries, features}, of_k = {batch, heads, keys, features};
  const Four of_v = {batch, heads, keys, outputs}, of_out = {batch, heads, queries, outputs};
  const Tensor q = Tensor::input(random, of_q), k = Tensor::input(random, of_k);
  const Tensor v = Tensor::input(random, of_v), grad = Tensor::input(random, of_out);
  const Array<float> bias(random, batch * keys);
  for (i64 i = 0; i < bias.size(); i++) bias[i] = random.chance(20) ? -infinity : random.number();
  bias.freeze();

  // The library's own dropout says which weights stay, where values are the columns of one.
  const i64 all = batch * heads * queries;
  std::vector<double> stays(all * keys, 1.0);
  const float* const given = biased ? bias.data() : nullptr;
  const auto forward = [&](const Tensor& values, const i64* told, Tensor& out, Array<float>& sums,
                           float factor, i32 threads) {
    expect(library.attention_forward(q.data, q.strides.data(), k.data, k.strides.data(),
                                     values.data, values.strides.data(), index.row_ptr.data(),
                                     pointer(index.cols), given, out.data, out.strides.data(),
                                     sums.data(), told, scale, seed, threshold, factor,
                                     threads) == 0, "status");
  };
  if (kept != 0) {
    const Four square = {batch, heads, keys, keys}, weights = {batch, heads, queries, keys};
    Four strides = random_strides(random, square);
    Tensor one(random, square, strides);
    each_place(square, [&](const Four& at, i64) { one[at] = at[2] == at[3]; });
    const i64 told[] = {batch, heads, queries, keys, features, keys, block, causal};
    Tensor with(random, weights, random_strides(random, weights));
    Tensor without(random, weights, random_strides(random, weights));
    Array<float> sums(random, all);
    forward(one, told, with, sums, kept, 2);
    forward(one, told, without, sums, 0, 1);
    each_place(weights, [&](const Four& at, i64 i) {
      const bool there = with[at] != 0;
      stays[i] = there ? kept : 0;
      if (there) expect(std::fabs(with[at] - kept * without[at]) < 1e-5, "a weight that is kept");
    });
  }

  // In double.
  std::vector<double> out(all * outputs), dq(all * features), dk(batch * heads * keys * features),
      dv(batch * heads * keys * outputs), sums(all, infinity);
  std::vector<double> weight(keys), share(keys);
  for (i64 n = 0; n < batch; n++)
    for (i64 h = 0; h < heads; h++)
      for (i64 i = 0; i < queries; i++) {
        const i64 row = (n * heads + h) * queries + i, first = (n * heads + h) * keys;
        std::fill(weight.begin(), weight.end(), -double{infinity});
        for (i64 p = index.row_ptr[i / block]; p < index.row_ptr[i / block + 1]; p++)
          for (i64 j = index.col[p] * block; j < (index.col[p] + 1) * block; j++) {
            if (causal && j > i) continue;
            weight[j] = biased ? bias[n * keys + j] : 0;
            for (i64 f = 0; f < features; f++)
              weight[j] += double{scale} * q[{n, h, i, f}] * k[{n, h, j, f}];
          }
        const double top = *std::max_element(weight.begin(), weight.end());
        if (top == -double{infinity}) continue;
        double sum = 0, mean = 0;
        for (double& w : weight) sum += w = std::exp(w - top);
        sums[row] = top + std::log(sum);
        for (i64 j = 0; j < keys; j++) {
          weight[j] /= sum;
          const double stay = stays[row * keys + j];
          share[j] = 0;
          for (i64 f = 0; f < outputs; f++) {
            out[row * outputs + f] += weight[j] * stay * v[{n, h, j, f}];
            share[j] += stay * grad[{n, h, i, f}] * v[{n, h, j, f}];
            dv[(first + j) * outputs + f] += weight[j] * stay * grad[{n, h, i, f}];
          }
          mean += weight[j] * share[j];
        }
        for (i64 j = 0; j < keys; j++) {
          const double slope = weight[j] * (share[j] - mean) * scale;
          for (i64 f = 0; f < features; f++) {
            dq[row * features + f] += slope * k[{n, h, j, f}];
            dk[(first + j) * features + f] += slope * q[{n, h, i, f}];
          }
        }
      }
  const auto near = [](const Array<float>& got, const std::vector<double>& wanted, double most,
                       const char* what) {
    expect_near(got, wanted, std::vector<double>(wanted.size(), most), 1e-4, what);
  };

  const Four out_strides = random_strides(random, of_out);
  struct Result {
    Tensor tensor;
    Array<float> elements, sums;
    bool operator==(const Result& other) const {
      return elements == other.elements && sums == other.sums;
    }
  };
  const auto make = [&] {
    return std::make_unique<Result>(
        Result{{random, of_out, out_strides}, {random, all * outputs}, {random, all}});
  };
  run_alike(
      random, make,
      [&](Result& to, i32 threads) {
        forward(v, sizes.data(), to.tensor, to.sums, kept, threads);
        to.tensor.copy_to(to.elements);
        near(to.elements, out, 4, "out of an attention");
        expect(to.tensor.gaps_are_untouched(), "what lies between the elements of out");
        for (i64 i = 0; i < all; i++)
          expect(std::isinf(sums[i]) ? to.sums[i] == infinity
                                     : std::fabs(to.sums[i] - sums[i]) < 1e-3, "sums");
      },
      "out of an attention depends on threads");

  const auto left = make();
  forward(v, sizes.data(), left->tensor, left->sums, kept, 1);
  const bool need_q = random.chance(70), need_k = random.chance(70), need_v = random.chance(70);
  Tensor to_q(random, of_q, random_strides(random, of_q));
  Tensor to_k(random, of_k, random_strides(random, of_k));
  Tensor to_v(random, of_v, random_strides(random, of_v));
  expect(library.attention_backward(
             grad.data, grad.strides.data(), q.data, q.strides.data(), k.data, k.strides.data(),
             v.data, v.strides.data(), left->tensor.data, out_strides.data(), left->sums.data(),
             index.row_ptr.data(), pointer(index.cols), given, need_q ? to_q.data : nullptr,
             to_q.strides.data(), need_k ? to_k.data : nullptr, to_k.strides.data(),
             need_v ? to_v.data : nullptr, to_v.strides.data(), sizes.data(), scale, seed,
             threshold, kept, 1 + static_cast<i32>(random.below(6))) == 0, "status");
  const auto check = [&](const Tensor& got, const std::vector<double>& wanted, const char* what) {
    const Array<float> elements(random, wanted.size());
    got.copy_to(elements);
    near(elements, wanted, 300, what);
    expect(got.gaps_are_untouched(), what);
  };
  if (need_q) check(to_q, dq, "dq of an attention");
  if (need_k) check(to_k, dk, "dk of an attention");
  if (need_v) check(to_v, dv, "dv of an attention");
}
