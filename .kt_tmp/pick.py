import sys, re, multiprocessing, os
sys.path[:0]=["benchmarks"]
import torch
from kernels import Shape, Step, SHAPES, Prompt, graph_time
from hf_paged_kernels.tuning import Tiling
import hf_paged_kernels as hk, importlib
cm=importlib.import_module("hf_paged_kernels.copy")
S={(s.rows,s.heads,s.context,s.block_size):s for s in SHAPES}
g=lambda r,c,p=16,h=8:S[(r,h,c,p)]
LINES=[
("GROUPED","132, FOREVER",[g(8,2048),g(8,8192)],[(16,32,1,3,2),(16,64,2,3,2),(16,32,1,4,2),(16,64,1,3,2)]),
("GROUPED","1024, 1024",[g(64,512)],[(16,32,1,3,1),(16,32,1,4,1),(16,32,2,4,1),(16,16,1,4,1),(16,64,1,3,1)]),
("GROUPED","1024, 4096",[g(64,2048),g(64,2048,1),g(64,2048,64),g(64,2304)],[(16,32,1,3,1),(64,64,4,3,1),(16,16,1,4,1),(16,64,1,3,1)]),
("GROUPED","1024, FOREVER",[g(64,8192)],[(16,128,4,3,1),(64,64,4,3,1),(16,32,1,3,1),(64,128,4,3,1),(16,32,1,6,1)]),
("GROUPED","FOREVER, 1024",[g(256,512)],[(16,32,1,3,1),(16,32,1,4,1),(16,64,2,3,1),(16,64,4,3,1),(16,64,1,3,1)]),
("GROUPED","FOREVER, FOREVER",[g(256,2048)],[(16,32,1,3,1),(16,64,2,3,1),(16,64,4,3,1),(64,64,4,3,1),(16,128,4,3,1),(16,128,4,2,1),(16,32,1,6,1),(16,64,2,4,1),(16,64,1,3,1)]),
("SINGLE","512, FOREVER",[g(8,2048,16,40)],[(16,32,1,3,1),(16,32,2,3,1),(16,32,1,3,2)]),
("SINGLE","FOREVER, 768",[g(64,512,16,40)],[(16,32,2,5,1),(16,32,1,4,1),(16,32,2,4,1),(16,32,1,5,1)]),
("SINGLE","FOREVER, FOREVER",[g(64,1024,16,40)],[(64,64,4,3,1),(16,32,2,4,1),(16,32,1,5,1),(16,64,2,4,1)]),
]
PROMPTS=[(128,64,8,3,1,None),(128,128,8,3,1,None),(128,64,8,2,1,128),(128,32,8,3,1,128),(128,32,8,4,1,128),(64,64,4,3,1,None),(64,64,4,2,1,168),(64,32,4,3,1,168),(128,64,8,3,1,168)]
def comp(job):
    try:
        z=torch.zeros(2**23*40,dtype=torch.bfloat16,device="cuda")
        if job[0]=="p": Prompt(1,64,z).attend(Tiling(*job[1])); return
        s,t=job; st=Step(Shape(1,s.query_heads,s.heads,64,s.block_size,0),z); st.attend(st.plan(Tiling(*t)),0)
    except Exception as e: print("cannot",job[1],type(e).__name__,str(e)[:80])
def main():
    uniq={}
    for _,_,ss,ts in LINES:
        for s in ss:
            for t in ts: uniq[(s.query_heads,s.heads,s.block_size,t[:4])]=(s,t)
    with multiprocessing.get_context("spawn").Pool(14) as pool: pool.map(comp,[("p",t) for t in PROMPTS]+list(uniq.values()),chunksize=1)
    noise=torch.empty(2**32+2**31,dtype=torch.bfloat16,device="cuda").normal_()
    path="kernels/hf_paged_kernels/tuning.py"; text=open(path).read()
    for table,prefix,shapes,ts in LINES:
        score={t:[] for t in ts}
        for s in shapes:
            step=Step(s,noise); plans={t:step.plan(Tiling(*t)) for t in ts}
            best={t:1e9 for t in ts}
            for _ in range(2):
                for t in ts: best[t]=min(best[t],step.microseconds(plans[t],9))
            for t in ts: score[t].append(best[t])
        order=sorted(ts,key=lambda t: sum(u/s.bar for u,s in zip(score[t],shapes)))
        print(table,prefix,"|"," ".join(",".join(map(str,t))+":"+"/".join(f"{u:.2f}" for u in score[t]) for t in order),flush=True)
        a=text.index(table+" = ["); head,rest=text[:a],text[a:]
        rest=rest.replace(re.search(re.escape(f"    ({prefix}, Tiling(")+r"[^)]*\)\),",rest).group(0),f"    ({prefix}, Tiling({', '.join(map(str,order[0]))})),",1)
        text=head+rest
    score={}
    for rows,length in ((1,8192),(8,2048)):
        p=Prompt(rows,length,noise)
        for t in PROMPTS:
            try: score.setdefault(t,[]).append(p.teraflops(Tiling(*t)))
            except Exception as e: print("cannot",t,str(e)[:80])
    order=sorted((t for t in score if len(score[t])==2),key=lambda t:-(score[t][0]/480+score[t][1]/384))
    print("prefill"," ".join(f"{','.join(map(str,t))}:{score[t][0]:.0f}/{score[t][1]:.0f}" for t in order))
    t=order[0]; text=re.sub(r"PROMPT = Tiling\([^)]*\)",f"PROMPT = Tiling({t[0]}, {t[1]}, {t[2]}, {t[3]}"+(f", registers={t[5]}" if t[5] else "")+")",text)
    open(path,"w").write(text); open(os.environ["OUT"]+"/tuning.py","w").write(text)
    pool=noise[: 32 * 1024 * 2**15].view(32, 1024, 2**15)
    for chunk in (4096,8192,16384,32768,65536):
        cm.CHUNK_BYTES=chunk
        out=[]
        for pairs in (8,64,256):
            calls=[]
            for _ in range(8):
                ids=torch.randperm(1024,device="cuda",dtype=torch.int32)
                calls.append(lambda ids=ids: hk.copy([pool],ids[:pairs],ids[pairs:2*pairs]))
            out.append(graph_time(calls))
        print("copy chunk",chunk,out,flush=True)
    for pairs in (64,):
        for dst in (lambda i: torch.arange(pairs,2*pairs),):
            ids=[torch.arange(2*pairs,device="cuda",dtype=torch.int32)+i*2*pairs for i in range(8)]
            print("sequential blocks", graph_time([lambda i=i: hk.copy([pool],i[:pairs],i[pairs:]) for i in ids]))
if __name__=="__main__": main()
