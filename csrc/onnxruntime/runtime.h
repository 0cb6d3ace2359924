// The part of onnxruntime's C interface that the operator needs, declared by the places that its
// functions have in its table, which stay the same from version to version.
#ifndef DYNSPARSE_ONNXRUNTIME_RUNTIME_H
#define DYNSPARSE_ONNXRUNTIME_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#include "base/simd.h"

namespace dynsparse {
namespace {

struct Status;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;
struct Domain;
struct SessionOptions;

constexpr uint32_t API_VERSION = 17;  // of onnxruntime 1.17: the first with ParallelFor
constexpr uint32_t OPERATOR_VERSION = 16;
enum ErrorCode { FAIL = 1, INVALID_ARGUMENT = 2 };
enum ElementType { FLOAT = 1, UINT8 = 2, INT8 = 3 };
enum Characteristic { REQUIRED = 0, OPTIONAL = 1 };

struct ApiBase {
  void* const* (*api)(uint32_t version);
  const char* (*version)();
};

// The functions of onnxruntime.
struct Api {
  void* const* table;

  template <class Function>
  Function at(int place) const {
    return reinterpret_cast<Function>(table[place]);
  }
  Status* error(ErrorCode code, const char* message) const {
    return at<Status* (*)(ErrorCode, const char*)>(0)(code, message);
  }
  Status* create_domain(const char* name, Domain** domain) const {
    return at<Status* (*)(const char*, Domain**)>(26)(name, domain);
  }
  Status* add_operator(Domain* domain, const void* op) const {
    return at<Status* (*)(Domain*, const void*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, Domain* domain) const {
    return at<Status* (*)(SessionOptions*, Domain*)>(28)(options, domain);
  }
  Status* data(const Value* value, void** data) const {
    return at<Status* (*)(const Value*, void**)>(51)(value, data);
  }
  Status* dimension_count(const TensorInfo* info, size_t* count) const {
    return at<Status* (*)(const TensorInfo*, size_t*)>(61)(info, count);
  }
  Status* dimensions(const TensorInfo* info, int64_t* sizes, size_t count) const {
    return at<Status* (*)(const TensorInfo*, int64_t*, size_t)>(62)(info, sizes, count);
  }
  Status* tensor_info(const Value* value, TensorInfo** info) const {
    return at<Status* (*)(const Value*, TensorInfo**)>(65)(value, info);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* value) const {
    return at<Status* (*)(const KernelInfo*, const char*, int64_t*)>(86)(info, name, value);
  }
  Status* input_count(const KernelContext* context, size_t* count) const {
    return at<Status* (*)(const KernelContext*, size_t*)>(88)(context, count);
  }
  Status* input(const KernelContext* context, size_t index, const Value** value) const {
    return at<Status* (*)(const KernelContext*, size_t, const Value**)>(90)(context, index, value);
  }
  Status* output(KernelContext* context, const int64_t* sizes, size_t count, Value** value) const {
    return at<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(
        context, 0, sizes, count, value);
  }
  void release(TensorInfo* info) const { at<void (*)(TensorInfo*)>(99)(info); }
  Status* constant_input(const KernelInfo* info, size_t index, int* is_constant,
                         const Value** value) const {
    return at<Status* (*)(const KernelInfo*, size_t, int*, const Value**)>(249)(info, index,
                                                                                is_constant, value);
  }
  Status* parallel_for(const KernelContext* context, void (*work)(void*, size_t), size_t tasks,
                       void* data) const {
    return at<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(
        274)(context, work, tasks, 0, data);
  }
};

struct Operator {
  uint32_t version;
  void* (*create)(const Operator*, void* const*, const KernelInfo*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  ElementType (*input_type)(const Operator*, size_t);
  size_t (*input_count)(const Operator*);
  ElementType (*output_type)(const Operator*, size_t);
  size_t (*output_count)(const Operator*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Characteristic (*input_characteristic)(const Operator*, size_t);
  Characteristic (*output_characteristic)(const Operator*, size_t);
  int (*input_memory)(const Operator*, size_t);
  int (*variadic[4])(const Operator*);
  Status* (*create_or_fail)(const Operator*, void* const*, const KernelInfo*, void**);
  Status* (*compute_or_fail)(void*, KernelContext*);
};

// Sizes of a tensor; more dimensions than these are refused.
struct Shape {
  static constexpr size_t MOST = 32;
  int64_t sizes[MOST];
  size_t count;

  i64 elements() const {
    i64 n = 1;
    for (size_t i = 0; i < count; i++) n *= sizes[i];
    return n;
  }
};

Status* shape_of(const Api& api, const Value* value, Shape* shape) {
  TensorInfo* info = nullptr;
  Status* status = api.tensor_info(value, &info);
  if (status) return status;
  status = api.dimension_count(info, &shape->count);
  if (!status && shape->count > Shape::MOST)
    status = api.error(INVALID_ARGUMENT, "SparseLinear: a tensor has too many dimensions");
  if (!status) status = api.dimensions(info, shape->sizes, shape->count);
  api.release(info);
  return status;
}

}  // namespace
}  // namespace dynsparse

#endif
