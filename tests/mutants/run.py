#!/usr/bin/env python3
"""Asks the suite itself: each fault below is put into the code, and the named test has to fail.

    python3 tests/mutants/run.py [--list] [NAME ...]

The first four were in the product once; the others are one-line faults of the same kinds. Needs a tree without changes and puts every
file back. Prints a line for each fault and ends with 1 if one survives. A fault takes a build of the library and one test program.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parents[2]

SECONDS = 600
"""Time for a test program, ten times what it takes."""

# name, file, the line as it is, the line with the fault, the test that must fail
MUTANTS = [
    (
        "uneven queries meet the tile at the width of packed words",
        "src/engine/cpu/blocks.rs",
        "let tile = LaneBlock { rows: &work.rows[..], width, n, stride };",
        "let tile = LaneBlock { rows: &work.rows[..], width: row_words, n, stride };",
        ["--test", "differential"],
    ),
    (
        "rows that are not finite take part in frames",
        "src/codec/frame.rs",
        "block.chunks_exact(dim).filter(|row| finite(row))",
        "block.chunks_exact(dim).filter(|_| true)",
        ["--test", "suite", "numbers::"],
    ),
    (
        "a call that fails keeps what it has appended",
        "src/cache/batch.rs",
        "if done.is_err() {\n            self.restore(undo);",
        "if done.is_err() && false {\n            self.restore(undo);",
        ["--test", "suite", "errors::"],
    ),
    (
        "a refused park changes the agent",
        "src/pool.rs",
        "        self.put(id, &self.adopt(parcel), Some(Terms { kind, priority, renew: true }))",
        "        self.allocate(id, kind, priority)?;\n        self.put(id, &self.adopt(parcel), None)",
        ["--test", "suite", "pool::"],
    ),
    (
        "causal queries see one token too many",
        "src/engine/attention.rs",
        "window.max(pad)..if rules.causal { query + 1 } else { usize::MAX }",
        "window.max(pad)..if rules.causal { query + 2 } else { usize::MAX }",
        ["--test", "differential"],
    ),
    (
        "a sliding window is one token short",
        "src/engine/attention.rs",
        "(query + 1).saturating_sub(w)",
        "(query + 2).saturating_sub(w)",
        ["--test", "differential"],
    ),
    (
        "a trim forgets what was kept for drafts",
        "src/cache/draft.rs",
        "self.border.clone().filter(|border| target <= border.at)",
        "self.border.clone().filter(|border| target < border.at)",
        ["--test", "suite", "own_tokens::"],
    ),
    (
        "checksums of tensors are not compared",
        "src/io/archive/manifest.rs",
        "if verify && file.metadata.get(CHECKSUM_KEY)",
        "if false && file.metadata.get(CHECKSUM_KEY)",
        ["--test", "suite", "archive::"],
    ),
    (
        "a seed of another layer is believed",
        "src/io/archive/reader.rs",
        "wanted.is_some_and(|wanted| wanted.seed == spec.seed)",
        "wanted.is_some()",
        ["--test", "suite", "archive::"],
    ),
    (
        "layers without keys and values are counted",
        "src/io/archive.rs",
        "self.kv_layers += usize::from(layer.is_kv());",
        "self.kv_layers += 1;",
        ["--test", "suite", "archive::"],
    ),
    (
        "a drop answers before older writes have ended",
        "src/pool/disk.rs",
        "        let version = table.next_version();\n        drop(self.outlive(table, id, version));",
        "        table.next_version();",
        ["--test", "suite", "pool::"],
    ),
    (
        "exact tokens have no bound",
        "src/recipe.rs",
        "pub const MOST_EXACT_TOKENS: usize = 1 << 26;",
        "pub const MOST_EXACT_TOKENS: usize = usize::MAX;",
        ["--test", "cli", "numbers_without_bound"],
    ),
    (
        "a line that cannot be written ends well",
        "src/cli/say.rs",
        "            exit(1)",
        "            exit(0)",
        ["--test", "cli", "a_full_disk_behind"],
    ),
    (
        "a child of fork() waits for its parent's threads",
        "src/engine/cpu/workers.rs",
        "Some(workers) if workers.process == process => return Ok(workers),",
        "Some(workers) => return Ok(workers),",
        ["--test", "capi", "a_forked_child"],
    ),
    (
        "files of Swift apps are read as those of mlx-lm",
        "src/io/prompt_cache/swift.rs",
        '"ArraysCache" | "MambaCache" if meta.is_some_and(|meta| meta.leaf() != Some("")) => {',
        '"ArraysCache" if meta.is_some_and(|meta| meta.leaf() != Some("")) => {',
        ["--test", "suite", "prompt_cache_hostile::files_of_swift"],
    ),
]


def cargo(test, *more):
    # Lints are of no interest here: a fault may leave something unused.
    environment = dict(os.environ, CARGO_INCREMENTAL="1")
    return subprocess.run(["cargo", "test", "--release", *test[:2], *more, *test[2:]], cwd=root, env=environment, capture_output=True)


def passes(test):
    """Whether the test passes in its time: with a fault, a test may wait for ever for what does not come."""
    command = ["cargo", "test", "--release", *test]
    environment = dict(os.environ, CARGO_INCREMENTAL="1")
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        return process.wait(SECONDS) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def caught(file, old, new, test):
    """Whether the test fails with the fault; raises if the fault has no place in the code any more, or does not compile."""
    path = root / file
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file}: {text.count(old)} places for a fault, expected one:\n{old}")
    try:
        path.write_text(text.replace(old, new))
        built = cargo(test[:2], "--no-run")
        if built.returncode != 0:
            raise SystemExit(f"{file}: the fault does not compile\n{built.stderr.decode()[-3000:]}")
        return not passes(test)
    finally:
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults to try [default: all]")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or any(name in m[0] for name in arguments.names)]
    if arguments.list:
        for name, file, _, _, test in chosen:
            print(f"{name}: {file}, {' '.join(test)}")
        return
    if subprocess.run(["git", "diff", "--quiet"], cwd=root).returncode != 0:
        raise SystemExit("the tree has changes; commit them first")
    survivors = 0
    for name, file, old, new, test in chosen:
        found = caught(file, old, new, test)
        survivors += not found
        print(f"{'caught' if found else 'SURVIVES'}: {name} ({' '.join(test)})", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults are caught")
    sys.exit(survivors > 0)


main()
