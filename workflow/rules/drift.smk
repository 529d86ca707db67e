# Do refresh cycles leave the base untouched, and what do PEFT's merge and unmerge leave behind?


rule drift:
    input:
        preflight=ancient(PREFLIGHT),
        model=f"work/{RUN}/model.json",
        adapter=f"work/{RUN}/adapter",
    output:
        f"results/{RUN}/drift/{{stack}}.json",
    log:
        f"{LOGS}/drift-{{stack}}.log",
    container:
        lambda wildcards: image(wildcards.stack)
    threads: CORES
    resources:
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
        runtime=30,
    params:
        cycles=CONFIG.drift.cycles,
        noise_std=CONFIG.drift.noise_std,
        lock=lambda wildcards: LOCKS[wildcards.stack],
        code=CODE["drift"],
        device=DEVICE,
        work=lambda wildcards: f"work/{RUN}",
    shell:
        "flexroll --stack {wildcards.stack} drift --config {resources.config:q} --work {params.work} --out {output}"
        " 2>&1 | tee {log}"
