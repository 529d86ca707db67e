# One run of an engine configuration that fills the compile caches, so that no measured process begins with a compile.


rule warmup:
    input:
        unpack(lambda wildcards: job_inputs(ENGINES[wildcards.engine])),
    output:
        f"work/{RUN}/warmup/{{engine}}.json",
    log:
        f"{LOGS}/warmup-{{engine}}.log",
    priority: FIRST
    container:
        lambda wildcards: image(ENGINES[wildcards.engine].stack)
    threads: CORES
    resources:
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
        runtime=lambda wildcards: job_minutes(ENGINES[wildcards.engine]),
    params:
        job=lambda wildcards: ENGINES[wildcards.engine].name,
        stack=lambda wildcards: ENGINES[wildcards.engine].stack,
        key=lambda wildcards: KEYS[ENGINES[wildcards.engine].name],
        work=lambda wildcards: f"work/{RUN}",
    shell:
        "flexroll --stack {params.stack} warmup --config {resources.config:q} --job {params.job} --work {params.work}"
        " --out {output} 2>&1 | tee {log}"
