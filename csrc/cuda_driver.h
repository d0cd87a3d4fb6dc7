// The few CUDA driver calls that launching needs, bound on first use: no toolkit at build time, no link dependency.
// Types and numbers are those of cuda.h (CUDA 12.0 and newer), repeated here because that header need not be installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace autokern::cuda {

using Result = int; // CUresult; 0 is success
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using Stream = void*;
using DevicePointer = unsigned long long;

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// CUlaunchAttribute. The value is a union of 64 bytes of which we use the first three words.
struct LaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int flag;
  } value;
};
constexpr int kAttributeCooperative = 2;
constexpr int kAttributeCluster = 4;
constexpr int kAttributeProgrammatic = 6;

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  Result (*module_load)(Module*, const void* image);
  Result (*module_function)(Function*, Module, const char* name);
  Result (*function_set)(Function, int attribute, int value);
  Result (*launch)(const LaunchConfig*, Function, void** parameters, void** extra);
  Result (*memset_async)(DevicePointer, unsigned char value, size_t count, Stream);
  Result (*error_name)(Result, const char** text);
  Result (*tensor_map)(
      TensorMap*, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides_bytes,
      const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill);
};
constexpr int kFunctionMaxDynamicShared = 8;
constexpr int kFunctionNonPortableCluster = 14;

// The bound driver. Throws c10::Error when there is none on this machine, or it lacks a call.
const Driver& driver();
std::string error_text(Result result); // "CUDA_ERROR_INVALID_IMAGE (200)"

} // namespace autokern::cuda
