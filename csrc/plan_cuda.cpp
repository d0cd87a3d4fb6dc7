// Launches on the current stream of the plan's device. Nothing here allocates, waits or loads: safe while a graph is
// captured.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "plan.h"

namespace autokern {
namespace {

void must(cuda::Result result, const char* what) {
  if (result != 0) {
    throw LaunchError(std::string(what) + ": " + cuda::error_text(result));
  }
}

void* current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl implementation(device.type());
  return implementation.getStream(device).native_handle();
}

// Fills `attributes` and returns how many are used.
unsigned launch_attributes(const CudaStep& step, std::array<cuda::LaunchAttribute, 3>& attributes) {
  unsigned count = 0;
  if (step.cluster[0] * step.cluster[1] * step.cluster[2] > 1) {
    auto& attribute = attributes[count++];
    attribute.id = cuda::kAttributeCluster;
    attribute.value.cluster = {step.cluster[0], step.cluster[1], step.cluster[2]};
  }
  if (step.cooperative) {
    auto& attribute = attributes[count++];
    attribute.id = cuda::kAttributeCooperative;
    attribute.value.flag = 1;
  }
  if (step.programmatic) {
    auto& attribute = attributes[count++];
    attribute.id = cuda::kAttributeProgrammatic;
    attribute.value.flag = 1;
  }
  return count;
}

} // namespace

void Plan::run_cuda(void* const* inputs, void* const* output_addresses, const Memory& memory) const {
  const cuda::Driver& driver = cuda::driver();
  void* stream = current_stream(device);
  for (size_t i = 0; i < workspaces.size(); ++i) {
    if (workspaces[i].zeroed) {
      const auto target = reinterpret_cast<cuda::DevicePointer>(memory.at(i).get());
      must(driver.memset_async(target, 0, workspaces[i].size_bytes, stream), "cuMemsetD8Async");
    }
  }
  for (const CudaStep& step : cuda_steps) {
    if (step.product) {
      std::array<void*, 6> at{};
      for (size_t i = 0; i < at.size(); ++i) {
        const auto& operand = step.operands.at(i);
        at.at(i) = operand ? address(*operand, inputs, output_addresses, memory) : nullptr;
      }
      const auto status = step.product->run({at[0], at[1], at[2], at[3], at[4], at[5]}, stream);
      if (status != 0) {
        throw LaunchError("cublasLtMatmul: " + cublaslt::status_text(status));
      }
      continue;
    }
    if (!step.function) {
      const auto target =
          reinterpret_cast<cuda::DevicePointer>(address(step.memset_target, inputs, output_addresses, memory));
      must(driver.memset_async(target, step.memset_value, step.memset_bytes, stream), "cuMemsetD8Async");
      continue;
    }
    std::array<cuda::TensorMap, 4> maps; // MAX_TENSOR_MAPS in runtime/plan.py
    for (size_t i = 0; i < step.maps.size(); ++i) {
      const TensorMapSpec& m = step.maps[i];
      must(
          driver.tensor_map(
              &maps.at(i), m.type, static_cast<unsigned>(m.sizes.size()),
              address(m.base, inputs, output_addresses, memory), m.sizes.data(), m.strides_bytes.data(), m.box.data(),
              m.element_strides.data(), m.interleave, m.swizzle, m.l2_promotion, m.fill),
          "cuTensorMapEncodeTiled");
    }
    std::array<uint64_t, kMaxPointers> values;
    std::array<void*, kMaxPointers> parameters;
    for (size_t i = 0; i < step.parameters.size(); ++i) {
      const CudaParameter& p = step.parameters[i];
      values[i] = p.kind == CudaParameter::Kind::kPointer
                      ? reinterpret_cast<uint64_t>(address(p.pointer, inputs, output_addresses, memory))
                      : p.bits;
      parameters[i] =
          p.kind == CudaParameter::Kind::kTensorMap ? static_cast<void*>(&maps.at(p.map_index)) : &values[i];
    }
    std::array<cuda::LaunchAttribute, 3> attributes{};
    const cuda::LaunchConfig config{
        step.grid[0],  step.grid[1],      step.grid[2], step.block[0],     step.block[1],
        step.block[2], step.shared_bytes, stream,       attributes.data(), launch_attributes(step, attributes)};
    must(driver.launch(&config, step.function, parameters.data(), nullptr), "cuLaunchKernelEx");
  }
}

} // namespace autokern
