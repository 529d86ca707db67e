# How likely the reference model finds the sample completions: one process, after all measurements.


rule perplexity:
    input:
        manifests=MANIFESTS,
        prompts=f"work/{RUN}/prompts.json",
        adapter=f"work/{RUN}/adapter" if any(job.adapter != "none" for job in JOBS.values()) else [],
    output:
        f"results/{RUN}/perplexity.json",
    log:
        f"{LOGS}/perplexity.log",
    container:
        image(STACKS[0])
    threads: workflow.cores
    resources:
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
        stack=STACKS[0],
    params:
        code=CODE["perplexity"],
        work=lambda wildcards: f"work/{RUN}",
        results=lambda wildcards: f"results/{RUN}",
    shell:
        "flexroll --stack {resources.stack} perplexity --config {resources.config:q} --work {params.work}"
        " --results {params.results} --out {output} 2>&1 | tee {log}"
