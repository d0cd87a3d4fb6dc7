// Whole functions as ops of their own: a call is looked up in the same table by what its body computes.
//
// A function's key is that of any op, its tensors as in key.h, and then two words: the first 128 bits of the SHA-256 of
// the graph of ATen ops that the body is at these layouts (`torch_autokern/ops/graph.py`). Python finds the graph once
// for each layout, because only the body can say; from then on a hit runs no Python.
#pragma once

#include <torch/extension.h>

namespace autokern {

void bind_functions(pybind11::module_& m);

} // namespace autokern
