#!/usr/bin/env bash
# Search how many tokens each block fuses, on images without labels, and use the result.
#
#     bash examples/tune.sh PHOTOS [FOLDER]
#
# PHOTOS is a folder with images, FOLDER where the schedule goes.
set -euo pipefail
photos=$1 folder=${2:-.}

mctf tune embedded --data "$photos" --flops 0.56 --output "$folder/schedule.json"
mctf eval embedded --data "$photos" --schedule "$folder/schedule.json" --no-progress
mctf eval embedded --data "$photos" --method ward --flops 0.56 --no-progress
