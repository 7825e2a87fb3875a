#!/bin/bash
# Draws the shipped studies and writes the page that shows them, docs/studies.md.
#
#     tools/studies.sh
#
# `TPUSIM` names a built program; without it one is built.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${TPUSIM:-}" ]; then
    cargo build --release --quiet
    TPUSIM=target/release/tpusim
fi
page=docs/studies.md
mkdir -p docs/images/studies
{
    echo "# Studies"
    echo
    echo "Questions about linear-attention layers, most of them about Systolic Linear Attention, each a file in \`workloads/studies/\` and a command: \`tpusim whatif NAME\` prints all rows, \`--hw\`, \`--set\` and"
    echo "\`--vary\` ask on. Times are predictions, with the intervals that the rows hold. \`tools/studies.sh\` makes this page and its pictures."
} > $page
for file in workloads/studies/*.yaml; do
    name=$(basename "$file" .yaml)
    # The first line is the title, the last one how to read the picture.
    rows=$("$TPUSIM" whatif "$file" --plot "docs/images/studies/$name" --quiet)
    rm "docs/images/studies/$name.png"
    {
        echo
        echo "## $(head -n 1 <<< "$rows")"
        echo
        echo "\`tpusim whatif $name\`"
        echo
        echo "![$(head -n 1 <<< "$rows")](images/studies/$name.svg)"
        echo
        # Errors and overflow of the layers, where the study executes them.
        if grep -q '^numerics: ' <<< "$rows"; then
            echo '```text'
            sed -n '/^numerics: /,/^$/p' <<< "$rows" | sed '/^$/d'
            echo '```'
            echo
        fi
        tail -n 1 <<< "$rows"
    } >> $page
done
# A question with a command of its own: its rows are executed, not only timed.
rows=$("$TPUSIM" state-formats gdn_decode --hw tpu-v6e,tpu-v7x,h200-sxm,rtx-4090 --plot docs/images/studies/state_formats --quiet)
rm docs/images/studies/state_formats.png
{
    echo
    echo "## In which format should a decode step store its state?"
    echo
    echo "\`tpusim state-formats\`"
    echo
    echo "![In which format should a decode step store its state?](images/studies/state_formats.svg)"
    echo
    echo '```text'
    echo "$rows"
    echo '```'
    echo
    echo "A rounding follows the state it is in: heads that forget within tens of tokens keep the rounding of tens of tokens, those that remember longer collect more, so errors rise with memory and stop growing once as much is forgotten as is added. bf16 errs less than the rounding of the activations does; FP8 with a scale per row errs some ten times more than bf16. The mixes show where the bits belong: with the finer format in the heads of long memory the error is that of the coarse format in heads that forget it, with the same bytes the other way round it is nearly that of the coarse format everywhere. Time follows bytes where bandwidth binds. Two formats are two launches, which small batches feel, and on the TPUs the row maxima, divisions and conversions of FP8 are vector work that can cost more than the bytes save."
} >> $page
