#!/usr/bin/env bash
# Search how many tokens each block fuses, on images without labels, and use the result.
#
#     bash examples/tune.sh PHOTOS [FOLDER]
#
# PHOTOS is a folder with images, FOLDER where the schedule goes.
set -euo pipefail
photos=$1 folder=${2:-.}

mctf tune embedded --data "$photos" --flops 0.56 --output "$folder/schedule.json"
mctf compare embedded --data "$photos" --methods ward --schedule "$folder/schedule.json"
