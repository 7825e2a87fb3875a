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
    echo "Questions about Systolic Linear Attention, each a file in \`workloads/studies/\` and a command: \`tpusim whatif NAME\` prints all rows, \`--hw\`, \`--set\` and"
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
