import sys; sys.path[:0]=["tests","kernels"]
import torch, test_kernels_decode as d, test_kernels_prefill as p, test_kernels_reference as r
d.verify(r.Case([300,17,0],heads=2,group=4,key_dim=128,dtype=torch.bfloat16,by_head=True), d.Tiling(16,32,2,3,2))
d.verify(r.Case([70,33],heads=2,group=1,key_dim=80,block_size=1,dtype=torch.bfloat16,starts=[3,0]), d.Tiling(16,32,1,3,4))
p.verify(r.Case([150,20],[150,3],heads=1,group=4,key_dim=128,dtype=torch.bfloat16))
import test_kernels_write as w, test_kernels_copy as c
w.check(3,5,2,80,16,4,torch.bfloat16,True); c.check([c.noise(3,7,2,2,4,16)],[0,1],[2,3]); torch.cuda.synchronize(); print("tiny ok")
