// The op families and the overloads of each that have a kernel of their own at a backend key. The first number is the
// family's index, which ops/*.py repeats and a test compares. native_layer_norm and its backward have no backend `out`.
#pragma once

#include <ATen/ops/_log_softmax_backward_data_cpu_dispatch.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_cpu_dispatch.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_cpu_dispatch.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_cpu_dispatch.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_ops.h>

// (family, at::_ops name, PyTorch's own CPU kernel under at::cpu with the same argument order)
// clang-format off
#define AUTOKERN_FOR_EACH_OVERLOAD(_) \
  _(0, mm, mm) _(0, mm_out, mm_outf) \
  _(1, addmm, addmm) _(1, addmm_out, addmm_outf) \
  _(2, bmm, bmm) _(2, bmm_out, bmm_outf) \
  _(3, baddbmm, baddbmm) _(3, baddbmm_out, baddbmm_outf) \
  _(4, _softmax, _softmax) _(4, _softmax_out, _softmax_outf) \
  _(5, _log_softmax, _log_softmax) _(5, _log_softmax_out, _log_softmax_outf) \
  _(6, native_layer_norm, native_layer_norm_symint) \
  _(7, _softmax_backward_data, _softmax_backward_data) _(7, _softmax_backward_data_out, _softmax_backward_data_outf) \
  _(8, _log_softmax_backward_data, _log_softmax_backward_data) _(8, _log_softmax_backward_data_out, _log_softmax_backward_data_outf) \
  _(9, native_layer_norm_backward, native_layer_norm_backward_symint)
// clang-format on

namespace autokern {
// Whole functions (function.cpp): no ATen op, any number of results.
constexpr size_t kFunctionFamily = 10;
constexpr bool uses_matmul_precision(size_t family) { return family <= 3 || family == kFunctionFamily; }
// Whether the family's plain int argument is a dimension, wrapped by the first tensor's rank.
constexpr bool int_is_dimension(size_t family) { return family == 4 || family == 5 || family == 7 || family == 8; }
// LayerNorm and its backward return three tensors, every other family one.
constexpr size_t result_count(size_t family) { return family == 6 || family == 9 ? 3 : 1; }
} // namespace autokern
