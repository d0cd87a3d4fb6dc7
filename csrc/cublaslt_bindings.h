#pragma once

#include <torch/extension.h>

namespace autokern {

void bind_cublaslt(pybind11::module_& m);

} // namespace autokern
