"""Rewrites a GGUF file with 16-bit weights.

The pinned llama.cpp server was compiled for a processor with AVX-VNNI, and its kernels for 4- and
8-bit weights end with an illegal instruction on processors without it (AMD's, for one). Its kernels
for 16-bit weights run on every processor with AVX-512. So the hub serves the model with its weights
expanded, which loses nothing: each value is the one that the kernels would have computed with.
"""

import concurrent.futures
import os
import struct
import sys

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
# Bytes of a scalar metadata value, by its type.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class Header:
    """A GGUF header, read in order."""

    def __init__(self, content):
        self.content = content
        self.at = 4
        if content[:4] != b"GGUF":
            raise SystemExit("gguf_f16: this is no GGUF file")
        self.version, tensors, pairs = self.read("IQQ")
        self.alignment = 32
        self.pairs = [self.pair() for _ in range(pairs)]
        self.tensors = [self.tensor() for _ in range(tensors)]
        self.data = -(-self.at // self.alignment) * self.alignment

    def read(self, form):
        values = struct.unpack_from("<" + form, self.content, self.at)
        self.at += struct.calcsize("<" + form)
        return values if len(values) > 1 else values[0]

    def text(self):
        length = self.read("Q")
        self.at += length
        return self.content[self.at - length : self.at]

    def skip(self, kind):
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            element, count = self.read("IQ")
            for _ in range(count):
                self.skip(element)
        else:
            self.at += SCALARS[kind]

    def pair(self):
        start = self.at
        key = self.text()
        kind = self.read("I")
        value = self.at
        self.skip(kind)
        if key == b"general.alignment":
            self.alignment = struct.unpack_from("<I", self.content, value)[0]
        if key == b"general.file_type":
            return self.content[start:value] + struct.pack("<I", F16)
        return self.content[start : self.at]

    def tensor(self):
        name = self.text()
        dimensions = [self.read("Q") for _ in range(self.read("I"))]
        kind, offset = self.read("IQ")
        elements = 1
        for dimension in dimensions:
            elements *= dimension
        return name, dimensions, kind, offset, elements


def expand(kind, content):
    """The blocks of one tensor as 16-bit numbers."""
    pieces = []
    if kind == Q4_1:
        for scale, least, nibbles in struct.iter_unpack("<ee16s", content):
            table = struct.pack("<16e", *[scale * i + least for i in range(16)])
            cells = [table[i : i + 2] for i in range(0, 32, 2)]
            pieces += [cells[byte & 15] for byte in nibbles]
            pieces += [cells[byte >> 4] for byte in nibbles]
    elif kind == Q8_0:
        for block in struct.iter_unpack("<e32b", content):
            pieces.append(struct.pack("<32e", *[block[0] * value for value in block[1:]]))
    else:
        raise SystemExit(f"gguf_f16: no rule for tensors of type {kind}")
    return b"".join(pieces)


SIZES = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}


def convert(source, target):
    """Writes `target`, whole or not at all."""
    with open(source, "rb") as file:
        content = file.read()
    header = Header(content)
    parts, infos, offset = [], [], 0
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for name, dimensions, kind, start, elements in header.tensors:
            per_block, size = SIZES.get(kind) or sys.exit(f"gguf_f16: no rule for tensors of type {kind}")
            start += header.data
            raw = content[start : start + elements // per_block * size]
            kept = kind in (F32, F16)
            parts.append(raw if kept else pool.submit(expand, kind, raw))
            length = len(raw) if kept else 2 * elements
            infos.append((name, dimensions, kind if kept else F16, offset))
            offset += -(-length // header.alignment) * header.alignment
        head = b"GGUF" + struct.pack("<IQQ", header.version, len(infos), len(header.pairs))
        head += b"".join(header.pairs)
        for name, dimensions, kind, at in infos:
            head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dimensions))
            head += struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", kind, at)
        partial = target + ".partial"
        with open(partial, "wb") as file:
            file.write(head + b"\0" * (-len(head) % header.alignment))
            for part in parts:
                raw = part if isinstance(part, bytes) else part.result()
                file.write(raw + b"\0" * (-len(raw) % header.alignment))
    os.rename(partial, target)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
