//! Memory that the allocator holds on to, given back to the system.

/// Gives back what is free. The allocator of glibc keeps freed blocks for later: after a cache has gone through a server, megabytes
/// that nobody counts.
pub(super) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time from any thread, and touches only memory that is free.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
