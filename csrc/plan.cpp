#include "plan.h"

#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>

#include "pool.h"

namespace autokern {

bool TensorLayout::matches(const at::Tensor& t) const {
  return present && t.scalar_type() == dtype && t.sizes() == at::IntArrayRef(sizes) &&
         t.strides() == at::IntArrayRef(strides) &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % t.element_size() == 0; // kernels may use aligned stores
}

// Straight to PyTorch's CPU kernels: no dispatch, so neither an override nor autograd sees this call.
void LibraryCall::run(void* const* inputs, void* const* outputs) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto tensor = [](void* data, const TensorLayout& layout) {
    return at::from_blob(data, layout.sizes, layout.strides, at::TensorOptions(layout.dtype));
  };
  const auto operand = [&](size_t i) { return tensor(inputs[operands[i].first], operands[i].second); };
  at::Tensor out = tensor(outputs[output], result);
  switch (function) {
    case Function::kMm:
      at::cpu::mm_out(out, operand(0), operand(1));
      break;
    case Function::kBmm:
      at::cpu::bmm_out(out, operand(0), operand(1));
      break;
    case Function::kAddmm:
      at::cpu::addmm_out(out, operand(0), operand(1), operand(2), beta, alpha);
      break;
    case Function::kBaddbmm:
      at::cpu::baddbmm_out(out, operand(0), operand(1), operand(2), beta, alpha);
      break;
  }
}

void Plan::check_pointer(const PointerArg& arg) const {
  const size_t limit = arg.kind == PointerArg::Kind::kInput    ? input_count
                       : arg.kind == PointerArg::Kind::kOutput ? outputs.size()
                                                               : workspaces.size();
  TORCH_CHECK(arg.index < limit, "autokern: a step points to argument ", arg.index, " of ", limit);
}

void Plan::check() const {
  TORCH_CHECK(workspaces.size() <= kMaxWorkspaces, "autokern: too many workspaces in a plan");
  for (const CpuStep& step : steps) {
    if (step.product) {
      for (const auto& [index, layout] : step.product->operands) {
        check_pointer({PointerArg::Kind::kInput, index, 0});
      }
      check_pointer({PointerArg::Kind::kOutput, step.product->output, 0});
    }
    TORCH_CHECK(step.args.size() <= kMaxPointers, "autokern: too many pointers in a step");
    for (const PointerArg& arg : step.args) {
      check_pointer(arg);
    }
  }
  for (const CudaStep& step : cuda_steps) {
    TORCH_CHECK(step.parameters.size() <= kMaxPointers, "autokern: too many parameters in a step");
    for (const CudaParameter& parameter : step.parameters) {
      if (parameter.kind == CudaParameter::Kind::kPointer) {
        check_pointer(parameter.pointer);
      }
    }
    for (const TensorMapSpec& map : step.maps) {
      check_pointer(map.base);
    }
    for (const auto& operand : step.operands) {
      if (operand) {
        check_pointer(*operand);
      }
    }
    if (!step.function && !step.product) {
      check_pointer(step.memset_target);
    }
  }
}

c10::Allocator* Plan::allocator() const {
  return device.is_cpu() ? c10::GetCPUAllocator() : c10::GetAllocator(device.type());
}

std::vector<at::Tensor> Plan::allocate_outputs(bool pooled) const {
  std::vector<at::Tensor> result;
  result.reserve(outputs.size());
  const c10::DeviceGuard guard(device);
  c10::Allocator* source = pooled && device.is_cpu() ? pool_allocator() : allocator();
  const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  for (const TensorLayout& layout : outputs) {
    if (!layout.present) {
      result.emplace_back();
      continue;
    }
    result.emplace_back(at::detail::empty_strided_generic(layout.sizes, layout.strides, source, keys, layout.dtype));
  }
  return result;
}

char* Plan::address(const PointerArg& arg, void* const* inputs, void* const* outputs, const Memory& memory) {
  void* start = arg.kind == PointerArg::Kind::kInput    ? inputs[arg.index]
                : arg.kind == PointerArg::Kind::kOutput ? outputs[arg.index]
                                                        : memory[arg.index].get();
  return start ? static_cast<char*>(start) + arg.offset_bytes : nullptr;
}

void Plan::run(void* const* inputs, void* const* output_addresses) const {
  const c10::DeviceGuard guard(device);
  Memory memory; // given back at return; on a GPU that is safe because the allocator reuses it in stream order only
  for (size_t i = 0; i < workspaces.size(); ++i) {
    memory.at(i) = allocator()->allocate(workspaces[i].size_bytes);
  }
  if (device.is_cpu()) {
    run_cpu(inputs, output_addresses, memory);
  } else {
    run_cuda(inputs, output_addresses, memory);
  }
}

void Plan::run_cpu(void* const* inputs, void* const* output_addresses, const Memory& memory) const {
  for (size_t i = 0; i < workspaces.size(); ++i) {
    if (workspaces[i].zeroed) {
      std::memset(memory.at(i).get(), 0, workspaces[i].size_bytes);
    }
  }
  for (const CpuStep& step : steps) {
    if (step.product) {
      step.product->run(inputs, output_addresses);
      continue;
    }
    std::array<void*, kMaxPointers> pointers;
    for (size_t i = 0; i < step.args.size(); ++i) {
      pointers[i] = address(step.args[i], inputs, output_addresses, memory);
    }
    at::parallel_for(
        0, step.range, step.grain, [&](int64_t begin, int64_t end) { step.entry(begin, end, pointers.data()); });
  }
}

} // namespace autokern
