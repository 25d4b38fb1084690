//! The system's allocator with a count of what the whole process holds, threads of the library included.
//!
//! A test program makes it its own: `#[global_allocator] static COUNTING: Counting = Counting;`. What is counted at the same time in
//! several tests cannot be told apart, so each of them waits for the others.
#![allow(dead_code, reason = "not every program reads every count")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes that are held.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The most bytes that were held since it was last set.
pub static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Calls that have asked for memory.
pub static CALLS: AtomicUsize = AtomicUsize::new(0);

/// The allocator.
pub struct Counting;

fn asked(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
    CALLS.fetch_add(1, Relaxed);
}

// SAFETY: every call goes to the system's allocator as it is; the counters are atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        asked(layout.size());
        // SAFETY: as the caller vouches.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        asked(layout.size());
        // SAFETY: as the caller vouches.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        asked(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller vouches.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller vouches.
        unsafe { System.dealloc(at, layout) }
    }
}
