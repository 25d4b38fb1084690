//! The C API, compiled into this program as well as built as a library: the calls below are those that C makes.

#[path = "../../mlx/capi/src/lib.rs"]
#[allow(unused_imports, dead_code, reason = "the tests do not make every call")]
mod capi;
#[path = "../common/mod.rs"]
mod common;

mod calls;
mod field_cases;
mod live;
