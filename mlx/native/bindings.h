/* Declares the half types to bindgen on every CPU, because mlx-c declares them for Arm only and mlx-rs needs both. */
#include <stdint.h>

/* Taking mlx-c's own include guard makes these the only definitions, so the Rust types are the same as on a Mac. */
#define MLX_HALF_H

#define HAS_FLOAT16
typedef _Float16 float16_t;

#define HAS_BFLOAT16
typedef uint16_t bfloat16_t;
