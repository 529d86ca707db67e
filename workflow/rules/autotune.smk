# The decode kernel options that Inductor's own autotuning likes best, for cells that replay them. A failure is a result.


rule autotune:
    input:
        preflight=ancient(PREFLIGHT),
        model=f"work/{RUN}/model.json",
    output:
        f"work/{RUN}/autotune/{{stack}}-{{kind}}.json",
    log:
        f"{LOGS}/autotune-{{stack}}-{{kind}}.log",
    wildcard_constraints:
        kind="plain|tma",
    priority: FIRST
    container:
        lambda wildcards: image(wildcards.stack)
    threads: CORES
    resources:
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
        runtime=int(CONFIG.limits.start_s / 60) + 1,
    params:
        shape=lambda wildcards: decode_shape(tuned_cell(CONFIG, wildcards.stack, wildcards.kind)),
        lock=lambda wildcards: LOCKS[wildcards.stack],
        code=CODE["autotune"],
        device=DEVICE,
        work=lambda wildcards: f"work/{RUN}",
    shell:
        "flexroll --stack {wildcards.stack} autotune --config {resources.config:q} --work {params.work}"
        " --kind {wildcards.kind} --out {output} 2>&1 | tee {log}"
