// The operators SparseLinear and QuantizedSparseLinear of onnxruntime: a library of its own, which
// needs neither Python nor OpenMP. `RegisterCustomOps` is what onnxruntime calls in it.
//
//   domain "dynsparse", version 1; all floats are float32
//   inputs      x [..., in]; values [nnz] or [nnz, b, b]; pattern uint8 [n]; bias [out], optional.
//               All but x must be constant: initializers of the graph.
//   attributes  out_features, in_features, block_size; gaps: 1 if the pattern is packed as gaps, 0
//               if as a mask (src/dynsparse/pattern/packed.py has both); relu: 1 if negative
//               results become 0
//   output      y [..., out] = x W^T + bias
//
// QuantizedSparseLinear has its values in int8, as `dynsparse_int8_forward` in api.h reads them:
// blocks whose size is a multiple of 8 are [nnz, b / 4, b, 4]. Before the bias comes the input
// scale [out], and there is one attribute more, int8_activations: 1 to round the activations as
// well.
//
// Files come from anywhere: what an attribute, a shape or the pattern says is checked when a
// session is created, against the sizes of the tensors.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "base/packed.h"
#include "onnxruntime/runtime.h"

namespace dynsparse {
namespace {

constexpr i64 SAMPLES = 64;             // of a task
constexpr i64 FEW = 32;                 // samples from which tasks are samples, not rows
constexpr i64 MOST_PARTS = 16;          // of the rows
constexpr i64 PART_MULTIPLIES = 16384;  // of a part, at least
constexpr i64 INT8_MULTIPLIES = 65536;  // likewise of int8: each part rounds the activations

struct Kernel {
  Api api;
  i64 out, in, block, nnz, parts, relu;
  i64 quantized, int8_activations;
  i32 *row_ptr, *cols;
  i64 part_rows[MOST_PARTS + 1];  // where parts of the rows begin, in blocks
  i32* part_ptr[MOST_PARTS];      // row_ptr of each, from 0
  void* panels;
  uint16_t* masks;  // of single elements, where products of few samples go by them
  i64 masks_samples;
};

void destroy(void* kernel) {
  auto* k = static_cast<Kernel*>(kernel);
  if (!k) return;
  free(k->row_ptr);
  free(k->cols);
  free(k->part_ptr[0]);
  free(k->panels);
  free(k->masks);
  free(k);
}

// Parts of the rows with about equally many blocks.
bool divide_rows(Kernel* k) {
  const i64 rows = k->out / k->block, multiplies = k->nnz * k->block * k->block;
  const i64 least_multiplies = k->quantized ? INT8_MULTIPLIES : PART_MULTIPLIES;
  k->parts =
      least(most(multiplies / least_multiplies, i64{1}), least(MOST_PARTS, most(rows, i64{1})));
  auto* ptr = static_cast<i32*>(malloc((rows + k->parts) * sizeof(i32)));
  if (!ptr) return false;
  i64 row = 0;
  for (i64 part = 0; part < k->parts; part++) {
    k->part_rows[part] = row;
    k->part_ptr[part] = ptr;
    const i64 end = k->nnz * (part + 1) / k->parts, first = k->row_ptr[row];
    *ptr++ = 0;
    while (row < rows && (k->row_ptr[row + 1] <= end || part + 1 == k->parts))
      *ptr++ = static_cast<i32>(k->row_ptr[++row] - first);
  }
  k->part_rows[k->parts] = rows;
  return true;
}

// Single elements of larger batches are faster by panels.
bool make_panels(Kernel* k) {
  if (k->block != 1 || dynsparse_panels_from(k->out, k->in, k->nnz, 0) > SAMPLES)
    return true;
  const i64 size = dynsparse_panels_size(k->out, k->in, k->nnz, 0, 0);
  k->panels = malloc(dynsparse_panels_bytes(k->out, k->in, k->nnz, size, 0));
  return k->panels &&
         !dynsparse_panels_make(k->row_ptr, k->cols, nullptr, 0, k->out, k->in, size, k->panels, 1);
}

i64 words_of(const Kernel& k) { return (k.in + 15) / 16; }

// Whether the kernels for few samples compute a batch in float32.
bool is_small(const Kernel& k, i64 batch) {
  constexpr i64 MOST = 8, BLOCKS = 4 | 8 | 16 | 32 | 64 | 128;
  if (k.block == 1) return batch <= k.masks_samples;
  return batch <= MOST && (k.block & (k.block - 1)) == 0 && (k.block & BLOCKS);
}

bool make_masks(Kernel* k) {
  if (k->block != 1) return true;
  k->masks_samples =
      dynsparse_small_masks_samples(k->nnz, k->out, k->in, static_cast<i32>(k->quantized));
  if (!k->masks_samples) return true;
  k->masks = static_cast<uint16_t*>(malloc(k->out * words_of(*k) * sizeof(uint16_t)));
  if (k->masks) dynsparse_small_masks(k->row_ptr, k->cols, k->masks, k->out, k->in, 1);
  return k->masks;
}

bool is_values(const Kernel& k, const Shape& shape) {
  const i64 b = k.block;
  if (b == 1 && shape.count == 1) return true;
  if (k.quantized && (b == 1 || b % 8 == 0))
    return shape.count == 4 && shape.sizes[1] == b / 4 && shape.sizes[2] == b &&
           shape.sizes[3] == 4;
  return shape.count == 3 && shape.sizes[1] == b && shape.sizes[2] == b;
}

Status* load(Kernel* k, const KernelInfo* info) {
  const Api& api = k->api;
  int64_t gaps = 0;
  Status* status = nullptr;
  const struct {
    const char* name;
    int64_t* value;
  } attributes[] = {{"out_features", &k->out}, {"in_features", &k->in},
                    {"block_size", &k->block}, {"gaps", &gaps},
                    {"relu", &k->relu},        {"int8_activations", &k->int8_activations}};
  for (size_t i = 0; i < size_t{5} + k->quantized; i++) {
    status = api.attribute(info, attributes[i].name, attributes[i].value);
    if (status) return status;
  }
  constexpr i64 LARGEST = i64{1} << 28;
  if (k->out < 1 || k->in < 1 || k->block < 1 || k->out > LARGEST || k->in > LARGEST ||
      k->out % k->block || k->in % k->block)
    return api.error(INVALID_ARGUMENT,
                     "SparseLinear: out_features and in_features must be positive multiples of "
                     "block_size");
  const Value* constants[4];
  Shape shapes[4];
  const size_t bias_input = 2 + k->quantized;
  for (size_t i = 0; i <= bias_input; i++) {
    int is_constant = 0;
    status = api.constant_input(info, i + 1, &is_constant, &constants[i]);
    // An absent bias is no constant.
    if (status) return status;
    shapes[i].count = 0;
    if (is_constant && constants[i]) {
      status = shape_of(api, constants[i], &shapes[i]);
      if (status) return status;
    } else if (i < bias_input) {
      return api.error(INVALID_ARGUMENT, "SparseLinear: all inputs but x must be initializers");
    }
  }
  const Shape &values = shapes[0], &pattern = shapes[1], &bias = shapes[bias_input];
  k->nnz = values.count ? values.sizes[0] : -1;
  if (k->nnz < 0 || k->nnz > 0x7fffffff || pattern.count != 1 || !is_values(*k, values))
    return api.error(INVALID_ARGUMENT,
                     "SparseLinear: values must be [nnz, block_size, block_size]");
  if (k->quantized && (shapes[2].count != 1 || shapes[2].sizes[0] != k->out))
    return api.error(INVALID_ARGUMENT, "SparseLinear: scale must be [out_features]");
  if (bias.count && (bias.count != 1 || bias.sizes[0] != k->out))
    return api.error(INVALID_ARGUMENT, "SparseLinear: bias must be [out_features]");
  const i64 rows = k->out / k->block, columns = k->in / k->block;
  k->row_ptr = static_cast<i32*>(malloc((rows + 1) * sizeof(i32)));
  k->cols = static_cast<i32*>(malloc(most(k->nnz, i64{1}) * sizeof(i32)));
  if (!k->row_ptr || !k->cols) return api.error(FAIL, "SparseLinear: out of memory");
  void* bytes = nullptr;
  status = api.data(constants[1], &bytes);
  if (status) return status;
  if (!unpack_pattern(static_cast<const uint8_t*>(bytes), pattern.elements(), gaps != 0, rows,
                      columns, k->nnz, k->row_ptr, k->cols))
    return api.error(INVALID_ARGUMENT, "SparseLinear: the pattern is not one of as many blocks");
  if (!divide_rows(k) || !make_panels(k) || !make_masks(k))
    return api.error(FAIL, "SparseLinear: out of memory");
  return nullptr;
}

template <bool QUANTIZED>
Status* create(const Operator*, void* const* table, const KernelInfo* info, void** kernel) {
  const Api api = {table};
  auto* k = static_cast<Kernel*>(calloc(1, sizeof(Kernel)));
  if (!k) return api.error(FAIL, "SparseLinear: out of memory");
  k->api = api;
  k->quantized = QUANTIZED;
  Status* status = load(k, info);
  if (status) {
    destroy(k);
    k = nullptr;
  }
  *kernel = k;
  return status;
}

struct Call {
  const Kernel* kernel;
  const float* x;
  const void* values;
  const float *scale, *bias;
  float* y;
  i64 batch;
  std::atomic<bool> failed;
};

void clip(float* y, i64 count, i64 relu) {
  if (relu)
    for (i64 i = 0; i < count; i++) y[i] = y[i] < 0 ? 0 : y[i];
}

void compute_samples(void* data, size_t task) {
  auto* call = static_cast<Call*>(data);
  const Kernel& k = *call->kernel;
  const i64 first = static_cast<i64>(task) * SAMPLES, count = least(SAMPLES, call->batch - first);
  const float* x = call->x + first * k.in;
  float* y = call->y + first * k.out;
  const uint16_t* masks = count <= k.masks_samples ? k.masks : nullptr;
  if (k.quantized
          ? dynsparse_int8_forward(x, k.in, 1, static_cast<const int8_t*>(call->values),
                                   call->scale, k.row_ptr, k.cols, k.panels, masks, call->bias, y,
                                   count, k.out, k.in, k.block,
                                   static_cast<int32_t>(k.int8_activations), 1)
          : dynsparse_linear_forward(x, k.in, 1, static_cast<const float*>(call->values), k.row_ptr,
                                     k.cols, nullptr, k.panels, call->bias, y, count, k.out, k.in,
                                     k.block, 1))
    call->failed = true;
  clip(y, count * k.out, k.relu);
}

// y [batch, width]: some rows of blocks, from row on.
bool rows_failed(const Call* call, size_t part, i64 row, i64 width, float* y) {
  const Kernel& k = *call->kernel;
  const float* bias = call->bias ? call->bias + row * k.block : nullptr;
  const i64 first = i64{k.row_ptr[row]} * k.block * k.block;
  const i32 *ptr = k.part_ptr[part], *cols = k.cols + k.row_ptr[row];
  const uint16_t* masks =
      call->batch <= k.masks_samples ? k.masks + row * words_of(k) : nullptr;
  if (k.quantized)
    return dynsparse_int8_forward(
        call->x, k.in, 1, static_cast<const int8_t*>(call->values) + first,
        call->scale + row * k.block, ptr, cols, nullptr, masks, bias, y, call->batch, width, k.in,
        k.block, static_cast<int32_t>(k.int8_activations), 1);
  const float* values = static_cast<const float*>(call->values) + first;
  if (is_small(k, call->batch))
    return dynsparse_small_forward(call->x, k.in, 1, values, ptr, cols, masks, bias, y, call->batch,
                                   width, k.in, k.block, 1);
  return dynsparse_linear_forward(call->x, k.in, 1, values, ptr, cols, nullptr, nullptr, bias, y,
                                  call->batch, width, k.in, k.block, 1);
}

void compute_rows(void* data, size_t part) {
  auto* call = static_cast<Call*>(data);
  const Kernel& k = *call->kernel;
  const i64 row = k.part_rows[part], width = (k.part_rows[part + 1] - row) * k.block;
  if (!width) return;
  float* y = call->y + row * k.block;
  // Outputs are contiguous: those of several samples are moved to their place.
  float* own =
      call->batch == 1 ? y : static_cast<float*>(malloc(call->batch * width * sizeof(float)));
  if (!own || rows_failed(call, part, row, width, own)) {
    call->failed = true;
  } else {
    clip(own, call->batch * width, k.relu);
    if (own != y)
      for (i64 n = 0; n < call->batch; n++)
        memcpy(y + n * k.out, own + n * width, width * sizeof(float));
  }
  if (own != y) free(own);
}

Status* compute(void* kernel, KernelContext* context) {
  const auto& k = *static_cast<const Kernel*>(kernel);
  const Api& api = k.api;
  constexpr size_t MOST = 5;
  const Value* inputs[MOST] = {};
  void* data[MOST] = {};
  size_t count = 0;
  Status* status = api.input_count(context, &count);
  for (size_t i = 0; i < count && i < MOST && !status; i++) {
    status = api.input(context, i, &inputs[i]);
    if (!status && inputs[i]) status = api.data(inputs[i], &data[i]);
  }
  Shape shape;
  if (!status) status = shape_of(api, inputs[0], &shape);
  if (status) return status;
  if (!shape.count || shape.sizes[shape.count - 1] != k.in) {
    char message[96];
    snprintf(message, sizeof message, "SparseLinear: x must be [..., %lld]",
             static_cast<long long>(k.in));
    return api.error(INVALID_ARGUMENT, message);
  }
  Call call = {&k, nullptr, nullptr, nullptr, nullptr, nullptr, shape.elements() / k.in, {false}};
  shape.sizes[shape.count - 1] = k.out;
  Value* output = nullptr;
  void* y = nullptr;
  status = api.output(context, shape.sizes, shape.count, &output);
  if (!status) status = api.data(output, &y);
  if (status || !call.batch) return status;
  call.x = static_cast<const float*>(data[0]);
  call.values = data[1];
  call.scale = static_cast<const float*>(k.quantized ? data[3] : nullptr);
  call.bias = static_cast<const float*>(data[3 + k.quantized]);
  call.y = static_cast<float*>(y);
  const bool by_samples = call.batch >= FEW;
  const i64 tasks = by_samples ? (call.batch + SAMPLES - 1) / SAMPLES : k.parts;
  const auto work = by_samples ? compute_samples : compute_rows;
  if (tasks == 1)
    work(&call, 0);
  else
    status = api.parallel_for(context, work, static_cast<size_t>(tasks), &call);
  if (!status && call.failed) status = api.error(FAIL, "SparseLinear: out of memory");
  return status;
}

template <bool QUANTIZED>
constexpr Operator sparse_linear = {
    OPERATOR_VERSION,
    nullptr,
    [](const Operator*) { return QUANTIZED ? "QuantizedSparseLinear" : "SparseLinear"; },
    [](const Operator*) -> const char* { return nullptr; },
    [](const Operator*, size_t index) {
      return index == 2 ? UINT8 : QUANTIZED && index == 1 ? INT8 : FLOAT;
    },
    [](const Operator*) -> size_t { return 4 + QUANTIZED; },
    [](const Operator*, size_t) { return FLOAT; },
    [](const Operator*) -> size_t { return 1; },
    nullptr,
    destroy,
    [](const Operator*, size_t index) { return index == 3 + QUANTIZED ? OPTIONAL : REQUIRED; },
    [](const Operator*, size_t) { return REQUIRED; },
    [](const Operator*, size_t) { return 0; },
    {},
    create<QUANTIZED>,
    compute,
};

}  // namespace
}  // namespace dynsparse

extern "C" DYNSPARSE_API void* RegisterCustomOps(void* options, const void* base);

extern "C" void* RegisterCustomOps(void* options, const void* base) {
  using namespace dynsparse;
  const auto* of = static_cast<const ApiBase*>(base);
  const Api api = {of->api(API_VERSION)};
  if (!api.table)
    return Api{of->api(1)}.error(FAIL, "dynsparse's operators need onnxruntime 1.17 or later");
  // One domain for all sessions: it must live as long as the last of them.
  static Domain* domain = [&]() -> Domain* {
    Domain* made = nullptr;
    const bool failed = api.create_domain("dynsparse", &made) ||
                        api.add_operator(made, &sparse_linear<false>) ||
                        api.add_operator(made, &sparse_linear<true>);
    return failed ? nullptr : made;
  }();
  return domain ? api.add_domain(static_cast<SessionOptions*>(options), domain)
                : api.error(FAIL, "dynsparse's operators could not be made");
}
