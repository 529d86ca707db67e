# How likely the reference model finds the sample completions: one process a stack, after its measurements.


rule perplexity:
    input:
        manifests=lambda wildcards: [
            f"results/{RUN}/raw/{job.name}/job.json" for job in JOBS.values() if job.stack == wildcards.stack
        ],
        prompts=f"work/{RUN}/prompts.json",
        adapter=lambda wildcards: (
            f"work/{RUN}/adapter"
            if any(job.adapter != "none" for job in JOBS.values() if job.stack == wildcards.stack)
            else []
        ),
    output:
        f"results/{RUN}/perplexity/{{stack}}.json",
    log:
        f"{LOGS}/perplexity-{{stack}}.log",
    container:
        lambda wildcards: image(wildcards.stack)
    threads: CORES
    resources:
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
    params:
        code=CODE["perplexity"],
        work=lambda wildcards: f"work/{RUN}",
        results=lambda wildcards: f"results/{RUN}",
    shell:
        "flexroll --stack {wildcards.stack} perplexity --config {resources.config:q} --work {params.work}"
        " --results {params.results} --out {output} 2>&1 | tee {log}"
