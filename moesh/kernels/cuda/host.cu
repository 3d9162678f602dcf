#include "moesh/kernels/cuda/host.h"

#include <array>
#include <utility>

namespace moesh::kernels::cuda {

namespace {

CUtensorMap encoded(CUtensorMapDataType type, int bytes, const void* base,
                    std::array<std::int64_t, 3> size, std::array<int, 3> box,
                    CUtensorMapSwizzle swizzle, Error& error) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {  // a function of the driver: not linked, but asked for
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const auto status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &result);
    return status == cudaSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  CUtensorMap map = {};
  if (!encode) {
    error = "the driver has no cuTensorMapEncodeTiled";
    return map;
  }
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(size[0]), static_cast<cuuint64_t>(size[1]),
                               static_cast<cuuint64_t>(size[2])};
  const cuuint64_t strides[2] = {sizes[0] * bytes, sizes[0] * sizes[1] * bytes};
  const cuuint32_t boxes[3] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]),
                               static_cast<cuuint32_t>(box[2])};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, type, 3, const_cast<void*>(base), sizes, strides, boxes, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    error = "a tensor map was refused: rows and addresses are to be multiples of 16 bytes";
  return map;
}

}  // namespace

CUtensorMap tensor_map(const void* base, std::int64_t x, std::int64_t y, std::int64_t z, int box_x,
                       int box_y, Error& error) {
  return encoded(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, {x, y, z}, {box_x, box_y, 1},
                 CU_TENSOR_MAP_SWIZZLE_128B, error);
}

CUtensorMap tensor_map(const float* base, std::int64_t x, std::int64_t y, int box_x, Error& error) {
  return encoded(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, base, {x, y, 1}, {box_x, 1, 1},
                 CU_TENSOR_MAP_SWIZZLE_NONE, error);
}

namespace {

/// 10 times its compute capability.
Error capability_of(int device, int& capability) {
  int major = 0, minor = 0;
  for (const auto& [value, attribute] : {std::pair(&major, cudaDevAttrComputeCapabilityMajor),
                                         std::pair(&minor, cudaDevAttrComputeCapabilityMinor)}) {
    if (Error error = text_of(cudaDeviceGetAttribute(value, attribute, device))) return error;
  }
  capability = 10 * major + minor;
  return nullptr;
}

}  // namespace

Error check_hopper(int device) {
  int capability = 0;
  if (Error error = capability_of(device, capability)) return error;
  return capability == 90 ? nullptr : "the device is not of compute capability 9.0";
}

Error check_ampere(int device) {
  int capability = 0;
  if (Error error = capability_of(device, capability)) return error;
  return capability >= 80 ? nullptr : "the device is not of compute capability 8.0 or later";
}

}  // namespace moesh::kernels::cuda
