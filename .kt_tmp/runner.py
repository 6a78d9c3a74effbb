import sys, multiprocessing
sys.path[:0]=["benchmarks"]
if __name__ == "__main__" or True:
    import torch
from kernels import Shape, Step, SHAPES
from hf_paged_kernels.tuning import Tiling
BASE={(1,2048):[(16,64,4,3,1)],(8,2048):[(16,32,1,4,2),(16,64,2,3,2)],(8,8192):[(16,64,2,3,2),(16,128,4,3,1)],(64,8192):[(16,128,4,3,1),(64,64,4,3,1)],(64,2048):[(64,64,4,3,1)],(64,512):[(16,32,1,4,1)]}
MHA={(1,2048):[(16,32,1,3,4)],(8,2048):[(16,32,1,3,1)],(64,1024):[(64,64,4,3,1),(16,32,2,4,1)],(64,512):[(16,32,1,4,1)]}
XG=[(16,64,4,5,1),(16,128,4,4,1),(16,32,1,6,1),(16,32,2,6,1),(16,32,1,5,1),(64,64,4,5,1),(64,128,4,3,1),(16,64,2,5,1),(16,32,1,3,1),(16,32,1,3,2),(16,32,1,5,2),(16,64,2,3,1),(16,64,1,3,1),(16,64,1,3,2),(16,64,1,2,2),(16,32,1,4,1),(16,32,1,4,2),(16,64,4,3,1),(16,64,2,3,2),(64,64,4,3,1),(16,128,4,3,1),(16,16,1,4,1),(16,16,1,4,2)]
XS=[(64,32,2,4,1),(64,32,4,3,1),(64,32,4,5,1),(64,64,4,4,1),(64,128,4,3,1),(16,32,2,3,1),(16,32,2,5,1),(16,32,4,4,1),(64,128,4,2,1)]
def name(s): return f"{s.rows},{s.query_heads}/{s.heads},{s.context},{s.block_size}"
def jobs(what):
    if what!="extra":
        for s in SHAPES:
            if s.ragged or s.block_size!=16: continue
            for t in (MHA if s.heads==40 else BASE).get((s.rows,s.context),[]): yield s,t
        return
    for s in SHAPES:
        if s.block_size!=16 or s.ragged: continue
        if (s.rows,s.context,s.heads) in {(8,8192,8),(64,8192,8),(8,2048,8),(64,2048,8)}:
            for t in XG: yield s,t
        if s.heads==40 and s.rows==64:
            for t in XS: yield s,t
    for s in [Shape(8,64,8,2048,16,0),Shape(64,64,8,2048,16,0),Shape(1,32,8,400,16,0),Shape(8,32,8,400,16,0),Shape(256,32,8,400,16,0),Shape(32,32,8,1024,16,0)]:
        for t in XG: yield s,t
def comp(job):
    s,t=job
    try:
        st=Step(Shape(1,s.query_heads,s.heads,64,s.block_size,0),torch.zeros(2**23*40,dtype=torch.bfloat16,device="cuda")); st.attend(st.plan(Tiling(*t)),0)
    except Exception as e: print("cannot",t,type(e).__name__)
def main(what):
    js=list(jobs(what)); uniq={(s.query_heads,s.heads,s.block_size,t[:4]):(s,t) for s,t in js}
    with multiprocessing.get_context("spawn").Pool(14) as pool: pool.map(comp,list(uniq.values()),chunksize=1)
    noise=torch.empty(2**32+2**31,dtype=torch.bfloat16,device="cuda").normal_()
    if what=="extra":
        x=noise[:2**30]; import triton
        from kernels import graph_time
        print("read ceiling: sum of 2 GiB", end=" ")
        us=graph_time([lambda i=i: torch.sum(noise[i*2**30:(i+1)*2**30].view(torch.float32).view(-1), dtype=torch.float32) for i in range(4)]); print(f"{2**31/us/1e6:.3f} TB/s {us:.1f} us")
    last=None; res={}
    for s,t in js:
        if last!=name(s): step=Step(s,noise); last=name(s)
        try: res.setdefault(last,[]).append((step.microseconds(step.plan(Tiling(*t)),9),t))
        except Exception as e: print("cannot",t,type(e).__name__,str(e)[:60])
    for n,r in res.items(): print(what,n," ".join(f"{u:.2f}:{','.join(map(str,t))}" for u,t in sorted(r)[:7]),flush=True)
if __name__=="__main__": main(sys.argv[1])
