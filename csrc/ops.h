// The op families and the overloads of each that have a kernel of their own at a backend key. The first number is the
// family's index, which ops/*.py repeats and a test compares. native_layer_norm and its backward have no backend `out`.
#pragma once

#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>

// clang-format off
#define AUTOKERN_FOR_EACH_OVERLOAD(_)        \
  _(0, mm)      _(0, mm_out)                 \
  _(1, addmm)   _(1, addmm_out)              \
  _(2, bmm)     _(2, bmm_out)                \
  _(3, baddbmm) _(3, baddbmm_out)            \
  _(4, _softmax)     _(4, _softmax_out)      \
  _(5, _log_softmax) _(5, _log_softmax_out)  \
  _(6, native_layer_norm)                    \
  _(7, _softmax_backward_data)     _(7, _softmax_backward_data_out)     \
  _(8, _log_softmax_backward_data) _(8, _log_softmax_backward_data_out) \
  _(9, native_layer_norm_backward)
// clang-format on

namespace autokern {
constexpr bool uses_matmul_precision(size_t family) { return family <= 3; }
// Whether the family's plain int argument is a dimension, wrapped by the first tensor's rank.
constexpr bool int_is_dimension(size_t family) { return family == 4 || family == 5 || family == 7 || family == 8; }
} // namespace autokern
