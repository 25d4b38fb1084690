"""The Metal texts under a stand-in for Apple's compiler: libclang in C++ for OpenCL mode, whose address spaces are part of types.

Held to: no diagnostic; no pointer or reference without an address space, which Metal does not have; no word that Metal reserves or
lacks; no recursion. Broken variants of the texts (`mutations.json`) must each be refused, else this check proves nothing.
"""

import json
import multiprocessing
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(next((HERE.parent.parent / "mlx/.runtime").glob("mlx-*/lib/python3*/site-packages"), HERE)))
from clang import cindex  # noqa: E402

ARGUMENTS = ["-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64", "-Wall", "-Wno-unknown-attributes", "-Wno-unused-function", "-Wno-undefined-inline", "-Wno-undefined-internal"]
RESERVED = {"goto", "new", "delete", "try", "catch", "throw", "virtual", "dynamic_cast", "typeid", "double", "asm", "long_double", "std"}
# Words of Metal that are no names of variables.
SPACES = {"kernel", "vertex", "fragment", "device", "constant", "threadgroup", "thread"}
ARRAY = "threadgroup T name[count]"


def text_of(folder, name):
    """A text with its header in place, and the line at which the project's own code begins."""
    header = (folder / "header.h").read_text()
    assert header.count(ARRAY) == 1
    header = header.replace("#include <metal_stdlib>", '#include "metal_stdlib.h"')
    header = header.replace(ARRAY, "threadgroup T* const name = tm_array<T, (count)>()")
    text = (folder / name).read_text().replace('#include "header.h"\n', header)
    # Attributes of Metal mean nothing here, and stand where C++ has none.
    return re.sub(r"\[\[.*?\]\]", "", text)


def code_of(text):
    return re.sub(r'//[^\n]*|"[^"\n]*"|^\s*#[^\n]*', "", text, flags=re.M)


def words_wrong(text):
    code = code_of(text)
    wrong = [f"the word {w}" for w in sorted(set(re.findall(r"\w+", code)) & RESERVED)]
    for space in sorted(SPACES):
        wrong += [f"a name {space}" for _ in re.findall(rf"\b{space}\s*(?:=|;|\[|\+|-|,)", code)]
    wrong += [f"an array without entries: {found}" for found in re.findall(r"\b\w+\s+\w+\[0\];", code)]
    return wrong


def tree_wrong(unit, path):
    wrong, calls = [], {}

    def walk(cursor, function):
        for child in cursor.get_children():
            if child.location.file and child.location.file.name != path:
                continue
            kind = child.kind
            inside = function
            if kind in (cindex.CursorKind.FUNCTION_DECL, cindex.CursorKind.FUNCTION_TEMPLATE):
                inside = child.spelling
                if "__generic" in child.result_type.get_canonical().spelling:
                    wrong.append(f"{child.spelling} returns a pointer without an address space, line {child.location.line}")
            if kind in (cindex.CursorKind.PARM_DECL, cindex.CursorKind.VAR_DECL, cindex.CursorKind.FIELD_DECL):
                if "__generic" in child.type.get_canonical().spelling:
                    wrong.append(f"{child.spelling} is a pointer without an address space, line {child.location.line}")
            if kind == cindex.CursorKind.LAMBDA_EXPR:
                wrong.append(f"a lambda, line {child.location.line}")
            if kind in (cindex.CursorKind.CALL_EXPR, cindex.CursorKind.OVERLOADED_DECL_REF, cindex.CursorKind.DECL_REF_EXPR) and function:
                calls.setdefault(function, set()).add(child.spelling)
            walk(child, inside)

    walk(unit.cursor, None)

    def reaches(start, at, seen):
        for callee in calls.get(at, ()):
            if callee == start or (callee in calls and callee not in seen and reaches(start, callee, seen | {callee})):
                return True
        return False

    wrong += [f"{name} calls itself" for name in sorted(calls) if reaches(name, name, {name})]
    return wrong


def wrong_with(text, tree=True):
    # It is not written anywhere; beside the header its include is found.
    path = str(HERE / "text.cl")
    unit = cindex.Index.create().parse(path, args=ARGUMENTS, unsaved_files=[(path, text)])
    wrong = [f"{d.location.line}: {d.spelling}" for d in unit.diagnostics]
    return wrong + words_wrong(text) + (tree_wrong(unit, path) if tree and not wrong else [])


def check(folder, name, what, tree):
    return [f"{what} ({name}): {line}" for line in wrong_with(text_of(folder, name), tree)[:5]]


def refused(folder, texts, mutation):
    name, before, after = mutation["source"], mutation["from"], mutation["to"]
    file = next(t["file"] for t in texts if t["source"] == name)
    text = text_of(folder, file)
    if text.count(before) < 1:
        return [f"{name} does not hold what a mutation changes: {before}"]
    return [] if wrong_with(text.replace(before, after, 1)) else [f"nothing is wrong with {name} after {before!r} -> {after!r}"]


def main(folder):
    texts = json.loads((folder / "list.json").read_text())
    mutations = json.loads((HERE / "mutations.json").read_text())
    # The tree says the same of all texts of a source, so a few of each are walked.
    seen, jobs = {}, []
    for text in texts:
        seen[text["source"]] = seen.get(text["source"], 0) + 1
        jobs.append((folder, text["file"], text["what"], seen[text["source"]] <= 3))
    with multiprocessing.Pool() as pool:
        wrong = [line for lines in pool.starmap(check, jobs, chunksize=4) for line in lines]
        wrong += [line for lines in pool.starmap(refused, [(folder, texts, m) for m in mutations]) for line in lines]
    print(f"{len(texts)} Metal texts and {len(mutations)} broken ones, {len(wrong)} wrong")
    for line in wrong:
        print(line, file=sys.stderr)
    return not wrong


if __name__ == "__main__":
    sys.exit(not main(pathlib.Path(sys.argv[1]) / "metal"))
