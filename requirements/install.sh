#!/bin/sh
# install.sh PYTHON WHAT ARGUMENTS...: "pip install ARGUMENTS" with one line of progress: the time so far, and what pip
# does. What pip prints is shown if it fails.
set -u
python=$1 what=$2
shift 2
log=$(mktemp) || exit 1
started=$(date +%s)
# A job of a script ignores interrupts.
trap 'kill "$pip" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
"$python" -m pip --disable-pip-version-check --no-input install --no-warn-conflicts --no-color "$@" >"$log" 2>&1 &
pip=$!

# pip's last line need not say what it does: while packages are copied it is about the removal of an old one.
doing() {
    awk '
        /^ *(Collecting|Processing|Requirement already satisfied)/ { doing = "looking for packages (" ++found ")" }
        /^ *(Downloading|Using cached) .*\(.*B\)/ { file = $2 == "cached" ? $3 : $2; sub(".*/", "", file)
            doing = "downloading " file " " $(NF - 1) " " $NF }
        /^ *(Building|Preparing|Installing build)/ { doing = "building packages" }
        /^ *Installing collected packages/ { doing = "copying " NF - 3 " packages" }
        END { print doing }' "$log"
}

said=0
while kill -0 "$pip" 2>/dev/null; do
    passed=$(($(date +%s) - started))
    # A line that the terminal breaks could not be written over.
    line=$(printf '%s: %d s  %s' "$what" "$passed" "$(doing)" | cut -c 1-78)
    if [ -t 1 ]; then
        printf '\r\033[K%s' "$line"
    elif [ "$passed" -ge "$said" ]; then
        printf '%s\n' "$line"
        said=$((passed + 20))
    fi
    sleep 1
done
wait "$pip"
status=$?
[ -t 1 ] && printf '\r\033[K'
if [ "$status" -eq 0 ]; then
    printf '%s: done in %d s\n' "$what" $(($(date +%s) - started))
else
    cat "$log" >&2
fi
rm -f "$log"
exit "$status"
