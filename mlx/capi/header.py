"""Makes mlx/include/turbomoq.h from mlx/capi/src: python3 mlx/capi/header.py [--check]

Reads the few forms of Rust that stand there (numbers, C enums and structs, opaque structs, extern functions) and refuses others.
"""

import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[2]
FILES = ("lib.rs", "rows.rs", "codes.rs", "tables.rs", "cache.rs", "live.rs", "heads.rs")
TYPES = {"usize": "size_t", "u32": "uint32_t", "u8": "uint8_t", "i32": "int32_t", "f32": "float", "f64": "double"}
TYPES |= {"c_void": "void", "c_char": "char"}
HEAD = """/* turbomoq: packed KV caches for engines in C and C++.
 *
 * Every call gives a status; tmq_last_error() has the words. Handles are freed once by their owner, not used after that, and used by
 * one thread at a time. A pointer is null or points to what the comment says.
 *
 * Structs begin with their own size, sizeof as the caller was compiled. Of a struct that the library fills, a caller with a shorter one
 * gets the fields that it knows, and one with a longer one zeros in the fields that the library does not know. A struct that the
 * library reads may be longer than the library's if what the library does not know is zero.
 *
 * A child of fork() may make calls too: it has threads of its own.
 * Made from mlx/capi/src by mlx/capi/header.py. */
#ifndef TURBOMOQ_H
#define TURBOMOQ_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
"""
TAIL = """
#ifdef __cplusplus
}
#endif

#endif
"""
DOC = r"((?:[ ]*///[^\n]*\n)+)"
ATTRIBUTES = r"(?:[ ]*#\[[^\n]*\]\n)*"


def comment(doc, indent=""):
    """A doc comment as one of C."""
    lines = [line.strip()[3:].strip().replace("`", "") for line in doc.strip().splitlines()]
    return f"{indent}/* " + f"\n{indent} * ".join(lines) + " */\n"


def declare(rust, name):
    """A name of a Rust type, as C declares it."""
    if match := re.fullmatch(r"\*(const|mut) (.+)", rust):
        kind, inner = match.groups()
        if inner.startswith("*"):
            return declare(inner, "*" + name)
        return ("const " if kind == "const" else "") + TYPES.get(inner, inner) + " *" + name
    if not re.fullmatch(r"\w+", rust):
        raise SystemExit(f"header.py: the type {rust!r} has no form in C")
    return f"{TYPES.get(rust, rust)} {name}"


def fields(body):
    """Documented fields or variants."""
    return re.findall(DOC + r"[ ]*(?:pub )?(\w+)(?:: ([^,\n]+)| = (\d+)),", body)


def main():
    numbers, types, functions = [], [], []
    for file in FILES:
        text = (root / "mlx/capi/src" / file).read_text()
        for doc, name, value in re.findall(DOC + r"pub const (\w+): u32 = (\d+);", text):
            numbers.append(comment(doc) + f"#define {name} {value}\n")
        for doc, name, body in re.findall(DOC + ATTRIBUTES + r"pub enum (\w+) \{\n(.*?)\n\}", text, re.S):
            inner = "".join(comment(d, "  ") + f"  {n} = {v},\n" for d, n, _, v in fields(body))
            types.append(comment(doc) + f"typedef enum {name} {{\n{inner}}} {name};\n")
        for doc, name, body in re.findall(DOC + ATTRIBUTES + r"pub struct (\w+) \{\n(.*?)\n\}", text, re.S):
            inner = "".join(comment(d, "  ") + f"  {declare(t, n)};\n" for d, n, t, _ in fields(body))
            types.append(comment(doc) + f"typedef struct {name} {{\n{inner}}} {name};\n")
        for doc, name in re.findall(DOC + r"pub struct (\w+)\(", text):
            types.append(comment(doc) + f"typedef struct {name} {name};\n")
        found = re.findall(DOC + ATTRIBUTES + r'pub (?:unsafe )?extern "C" fn (\w+)\((.*?)\)(?: -> ([^{]+?))? \{', text, re.S)
        for doc, name, parameters, result in found:
            pairs = [p.strip().split(": ") for p in parameters.split(",") if p.strip()]
            inner = ", ".join(declare(t, n) for n, t in pairs) or "void"
            functions.append(comment(doc) + declare(result.strip(), name) + f"({inner});\n" if result else comment(doc) + f"void {name}({inner});\n")
        if len(found) != text.count("no_mangle"):
            raise SystemExit(f"header.py: {file} has {text.count('no_mangle')} functions, {len(found)} were read")
    made = HEAD + "\n" + "\n".join(numbers + types + functions) + TAIL
    path = root / "mlx/include/turbomoq.h"
    if "--check" in sys.argv:
        if path.read_text() != made:
            raise SystemExit("mlx/include/turbomoq.h is not what mlx/capi/src says: python3 mlx/capi/header.py")
    else:
        path.write_text(made)


main()
