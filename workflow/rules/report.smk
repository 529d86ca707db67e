# Raw records -> one table and the claims' verdicts -> the document. Seconds, no torch, no benchmark.


rule analyse:
    input:
        manifests=MANIFESTS,
        drift=DRIFT,
        perplexity=PERPLEXITY,
        quality=QUALITY,
        grpo=GRPO,
        claims="report/claims.yaml",
    output:
        table=f"results/{RUN}/table.csv",
        analysis=f"results/{RUN}/analysis.json",
    log:
        f"{LOGS}/analyse.log",
    container:
        image(deploy.REPORT)
    resources:
        config=CONFIG_PATH,
        gpu=0,
    params:
        config=CONFIG.model_dump_json(),
        code=CODE["analyse"],
        results=lambda wildcards: f"results/{RUN}",
        stacks=f"--stacks {','.join(ONLY)}" if ONLY else "",
    shell:
        "flexroll analyse --config {resources.config:q} --results {params.results} {params.stacks} 2>&1 | tee {log}"


rule report:
    input:
        analysis=f"results/{RUN}/analysis.json",
        drift=DRIFT,
        template=sorted(str(path) for path in Path("report").iterdir() if path.name != "claims.yaml"),
    output:
        document=f"results/{RUN}/results.md",
        page=f"results/{RUN}/results.html",
        figures=directory(f"results/{RUN}/figures"),
    log:
        f"{LOGS}/report.log",
    container:
        image(deploy.REPORT)
    resources:
        config=CONFIG_PATH,
        gpu=0,
    params:
        code=CODE["report"],
        results=lambda wildcards: f"results/{RUN}",
    shell:
        "flexroll report --config {resources.config:q} --results {params.results} 2>&1 | tee {log}"
