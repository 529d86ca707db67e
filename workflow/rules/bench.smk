# One process an engine configuration and session. It writes a file a cell as it goes, and the manifest last.


rule bench:
    input:
        unpack(lambda wildcards: job_inputs(JOBS[wildcards.job], after_warmup=True)),
    output:
        f"results/{RUN}/raw/{{job}}/job.json",
    log:
        f"{LOGS}/bench-{{job}}.log",
    priority: lambda wildcards: PRIORITY[wildcards.job]
    container:
        lambda wildcards: image(JOBS[wildcards.job].stack)
    # All cores: two measurements side by side spoil both.
    threads: CORES
    resources:
        **SESSIONS,
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
        runtime=lambda wildcards: job_minutes(JOBS[wildcards.job]),
    params:
        stack=lambda wildcards: JOBS[wildcards.job].stack,
        key=lambda wildcards: KEYS[wildcards.job],
        work=lambda wildcards: f"work/{RUN}",
        raw=lambda wildcards: f"results/{RUN}/raw",
    shell:
        "flexroll --stack {params.stack} bench --config {resources.config:q} --job {wildcards.job} --work {params.work}"
        " --raw {params.raw} --out {output} 2>&1 | tee {log}"
