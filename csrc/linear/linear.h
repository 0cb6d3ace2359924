// The sparse linear products on float32 values, for activations of either type.
#pragma once

#include "base/layout.h"

namespace dynsparse {

// The pattern of W [out, in] as api.h describes it; forward needs the CSR part only.
struct Index {
  const i32* row_ptr;
  const i32* cols;
  const i32* slots;
  const i32* col_ptr;
  const i32* csc_rows;
  const i32* csc_perm;
  i64 out;
  i64 in;
  i64 block;
  // What dynsparse_panels_make has made of the CSR and of the CSC part, or null: then the entries
  // are worked on as they come.
  const void* row_panels;
  const void* col_panels;
};

// As the functions of the C interface. y and dx have the type of the activations.
int linear_forward(const Matrix& x, const float* values, const Index& index, const float* bias,
                   const Output& y, i64 batch, int threads);
int linear_backward(const Matrix& dy, const Matrix& x, const float* values, const Index& index,
                    const Output& dx, float* dvalues, float* dbias, i64 batch, int threads);

// dy [batch, out] summed over the samples, for passes that have no sums of their own.
void sum_samples(const Matrix& dy, i64 batch, i64 out, float* sums, int threads);

}  // namespace dynsparse
