//! Work held to one instruction set, in Rayon's workers too.

use rayon::ThreadPoolBuilder;
use turbomoq::internals::engine::cpu::probe;

/// Runs `work` once for each instruction set of this machine that the CPU engine has forms for, with its name.
pub fn each_level(work: impl Fn(&str) + Sync) {
    for (i, name) in probe::levels().iter().enumerate() {
        at(i, || work(name));
    }
}

/// Runs `work` at a level of [`probe::levels`]; those that there are not are the last one.
pub fn at<T: Send>(level: usize, work: impl FnOnce() -> T + Send) -> T {
    let pool = ThreadPoolBuilder::new().start_handler(move |_| probe::at_most(level)).build().unwrap();
    pool.install(work)
}
