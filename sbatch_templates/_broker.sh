# ---- broker: a child process of this script, in no job step and without MPI -------------------------
rm -f "$access" "$step" "$step.nodes" "$lost"           # files of an earlier start of a requeued job
tangram broker --restarts 5 --placer <PLACER> --nodes "$lenders" <BROKER_OPTIONS> &
broker=$!
until [ -s "$access" ]; do
    if ! kill -0 "$broker" 2>/dev/null; then
        status=0
        wait "$broker" || status=$?
        echo "tangram: error: the broker did not start (status $status)" >&2
        exit "$((status ? status : 1))"
    fi
    sleep 0.1
done
