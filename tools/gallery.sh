#!/bin/sh
# Draws the roofline of every shipped workload and writes the page that shows them, docs/gallery.md.
#
#     tools/gallery.sh
#
# `TPUSIM` names a built program; without it one is built. Only SVG files are kept, so that the pictures stay small.
set -eu
cd "$(dirname "$0")/.."

chips=tpu-v7x,h100-sxm
pictures=docs/images/gallery
page=docs/gallery.md

if [ -z "${TPUSIM:-}" ]; then
    cargo build --release --quiet
    TPUSIM=target/release/tpusim
fi

rm -rf "$pictures"
mkdir -p "$pictures"
{
    printf '# Gallery\n\n'
    printf 'Rooflines of the shipped workloads on one TensorCore of a TPU v7x and on an H100, drawn by `tools/gallery.sh`.\n'
    printf '`tpusim roofline W --hw a,b,c` draws one on other chips, `--theme dark` on dark paper. How to read them: [formats.md](formats.md#the-roofline-picture).\n'
    printf '\n## Kernels of SLA and KDA, compiled for every TPU generation\n\n'
    printf 'Simulated from the schedule of the TPU compiler, beside the fast model ([kernels.md](kernels.md), made by `tpusim kernels --page docs/kernels.md`).\n\n'
    printf '![Times of KDA and SLA-R4 kernels on every generation](images/kernels/times.svg)\n\n'
    printf '![Slots in use](images/kernels/slots.svg)\n\n'
    printf '![What single choices of an SLA kernel cost](images/kernels/choices-sla.svg)\n\n'
    printf '![What single choices of a KDA kernel cost](images/kernels/choices-kda.svg)\n'
} > "$page"

for file in workloads/*.yaml; do
    # A stack of layers has no roofline of its own.
    if grep -q '^stack:' "$file"; then
        continue
    fi
    name=$(basename "$file" .yaml)
    headline=$("$TPUSIM" --quiet roofline "$name" --hw "$chips" --out "$pictures/$name")
    rm "$pictures/$name.png"
    # The first comment, behind the line for editors.
    title=$(sed -n '/^# yaml-language-server:/d; /^#/{s/^# *//p; q; }' "$file")
    {
        printf '\n## %s\n\n' "$name"
        printf '%s\n\n' "$title"
        printf '![Roofline of %s](images/gallery/%s.svg)\n\n' "$name" "$name"
        printf '%s.\n' "$headline"
    } >> "$page"
done
