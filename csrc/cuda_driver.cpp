#include "cuda_driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace autokern::cuda {
namespace {

template <class Pointer>
void bind(void* library, Pointer& target, const char* name) {
  target = reinterpret_cast<Pointer>(::dlsym(library, name));
  TORCH_CHECK(target, "autokern: the CUDA driver on this machine has no ", name, "; update it to CUDA 12.0 or newer");
}

Driver bind_all() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library, "autokern: no CUDA driver: ", ::dlerror());
  Driver d{};
  bind(library, d.module_load, "cuModuleLoadData");
  bind(library, d.module_function, "cuModuleGetFunction");
  bind(library, d.function_set, "cuFuncSetAttribute");
  bind(library, d.launch, "cuLaunchKernelEx");
  bind(library, d.memset_async, "cuMemsetD8Async");
  bind(library, d.error_name, "cuGetErrorName");
  bind(library, d.tensor_map, "cuTensorMapEncodeTiled");
  return d;
}

} // namespace

const Driver& driver() {
  static const Driver bound = bind_all();
  return bound;
}

std::string error_text(Result result) {
  const char* name = nullptr;
  if (driver().error_name(result, &name) != 0 || !name) {
    name = "unknown CUDA error";
  }
  return std::string(name) + " (" + std::to_string(result) + ")";
}

} // namespace autokern::cuda
