#!/usr/bin/env bash
# Search how many tokens each block fuses, on images without labels, and measure the result.
#
#     bash examples/tune.sh PHOTOS [FOLDER] [MODEL]
#
# PHOTOS is a folder with images, FOLDER where the schedule goes.
set -euo pipefail
photos=$1 folder=${2:-.} model=${3:-embedded}

mctf tune "$model" --data "$photos" --flops 0.56 --output "$folder/schedule.json"
mctf compare "$model" --data "$photos" --methods ward --schedule "$folder/schedule.json"
