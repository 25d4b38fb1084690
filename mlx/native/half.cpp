// Gives mlx-rs the half-precision accessors, because mlx-c compiles them for Arm only.
#include <cstdint>
#include <exception>

#include "mlx/c/array.h"
#include "mlx/c/error.h"
#include "mlx/c/private/mlx.h"
#include "mlx/mlx.h"

// A half value crosses the C boundary as its 16 bits. bindings.h declares these functions to Rust.
static_assert(sizeof(mlx::core::float16_t) == sizeof(uint16_t));
static_assert(sizeof(mlx::core::bfloat16_t) == sizeof(uint16_t));

namespace {

template <typename Half>
int item(uint16_t* res, const mlx_array arr) {
  try {
    const Half value = mlx_array_get_(arr).item<Half>();
    __builtin_memcpy(res, &value, sizeof(value));
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}

template <typename Half>
const uint16_t* data(const mlx_array arr) {
  try {
    return reinterpret_cast<const uint16_t*>(mlx_array_get_(arr).data<Half>());
  } catch (std::exception& e) {
    mlx_error(e.what());
    return nullptr;
  }
}

} // namespace

#ifndef HAS_FLOAT16
extern "C" int mlx_array_item_float16(uint16_t* res, const mlx_array arr) {
  return item<mlx::core::float16_t>(res, arr);
}
extern "C" const uint16_t* mlx_array_data_float16(const mlx_array arr) {
  return data<mlx::core::float16_t>(arr);
}
#endif

#ifndef HAS_BFLOAT16
extern "C" int mlx_array_item_bfloat16(uint16_t* res, const mlx_array arr) {
  return item<mlx::core::bfloat16_t>(res, arr);
}
extern "C" const uint16_t* mlx_array_data_bfloat16(const mlx_array arr) {
  return data<mlx::core::bfloat16_t>(arr);
}
#endif
