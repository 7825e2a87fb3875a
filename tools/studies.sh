#!/bin/bash
# Draws the shipped studies anew and writes docs/studies.md: `tools/studies.sh [PROGRAM]`, from the root of the project.
set -euo pipefail
tpusim=${1:-tpusim}
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
    rows=$("$tpusim" whatif "$file" --plot "docs/images/studies/$name" --quiet)
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
