//! A number of places for work that needs memory: whoever finds none free waits.

use super::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// A number of places.
#[derive(Debug)]
pub(super) struct Gate {
    free: Mutex<usize>,
    left: Condvar,
}

impl Gate {
    /// So many places, at least one.
    pub(super) fn new(places: usize) -> Gate {
        Gate { free: Mutex::new(places.max(1)), left: Condvar::new() }
    }

    /// Runs a job as soon as a place is free.
    pub(super) fn run<R>(&self, job: impl FnOnce() -> R) -> R {
        struct Turn<'a>(&'a Gate);
        impl Drop for Turn<'_> {
            fn drop(&mut self) {
                *lock(&self.0.free) += 1;
                self.0.left.notify_one();
            }
        }
        let mut free = lock(&self.free);
        while *free == 0 {
            free = self.left.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        drop(free);
        let _place = Turn(self);
        job()
    }
}
