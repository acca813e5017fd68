;; A convolution without padding, for four channels of the output. Numbers are float32, and a pixel's channels are neighbours.
;; The five numbers of each kernel row and channel lie together in the image, so that a kernel row is one run of numbers.
;; Four neighbouring pixels of the output are made at once. In the last group of a row some may lie beyond its end: they take
;; places of the next row, which overwrites them. After the last row three pixels of room are needed.
(module
  (import "page" "memory" (memory 1))
  (func (export "convolve")
    (param $image i32)      ;; addresses in bytes
    (param $weights i32)    ;; [kernel rows, run, 4]
    (param $out i32)
    (param $rows i32)       ;; of the output
    (param $columns i32)
    (param $image_row i32)  ;; from one row or pixel to the next, in bytes
    (param $image_pixel i32)
    (param $out_pixel i32)
    (param $kernel_rows i32)
    (param $run i32)        ;; the length of a kernel row in bytes
    (local $left i32) (local $line i32) (local $place i32) (local $target i32)
    (local $kernel_row i32) (local $at i32) (local $end i32) (local $weight i32)
    (local $a v128) (local $b v128) (local $c v128) (local $d v128) (local $w v128)
    loop $each_row
      local.get $columns
      local.set $left
      local.get $image
      local.set $place
      local.get $out
      local.set $target
      loop $each_group
        v128.const i32x4 0 0 0 0
        local.tee $a
        local.tee $b
        local.tee $c
        local.set $d
        local.get $weights
        local.set $weight
        local.get $kernel_rows
        local.set $kernel_row
        local.get $place
        local.set $line
        loop $each_kernel_row
          local.get $line
          local.tee $at
          local.get $run
          i32.add
          local.set $end
          loop $each_number
            local.get $weight
            v128.load
            local.set $w
            local.get $a
            local.get $at
            v128.load32_splat
            local.get $w
            f32x4.mul
            f32x4.add
            local.set $a
            local.get $b
            local.get $at
            local.get $image_pixel
            i32.add
            v128.load32_splat
            local.get $w
            f32x4.mul
            f32x4.add
            local.set $b
            local.get $c
            local.get $at
            local.get $image_pixel
            i32.const 1
            i32.shl
            i32.add
            v128.load32_splat
            local.get $w
            f32x4.mul
            f32x4.add
            local.set $c
            local.get $d
            local.get $at
            local.get $image_pixel
            i32.const 3
            i32.mul
            i32.add
            v128.load32_splat
            local.get $w
            f32x4.mul
            f32x4.add
            local.set $d
            local.get $weight
            i32.const 16
            i32.add
            local.set $weight
            local.get $at
            i32.const 4
            i32.add
            local.tee $at
            local.get $end
            i32.lt_u
            br_if $each_number
          end
          local.get $line
          local.get $image_row
          i32.add
          local.set $line
          local.get $kernel_row
          i32.const 1
          i32.sub
          local.tee $kernel_row
          br_if $each_kernel_row
        end
        local.get $target
        local.get $a
        v128.store
        local.get $target
        local.get $out_pixel
        i32.add
        local.tee $target
        local.get $b
        v128.store
        local.get $target
        local.get $out_pixel
        i32.add
        local.tee $target
        local.get $c
        v128.store
        local.get $target
        local.get $out_pixel
        i32.add
        local.tee $target
        local.get $d
        v128.store
        local.get $target
        local.get $out_pixel
        i32.add
        local.set $target
        local.get $place
        local.get $image_pixel
        i32.const 2
        i32.shl
        i32.add
        local.set $place
        local.get $left
        i32.const 4
        i32.sub
        local.tee $left
        i32.const 0
        i32.gt_s
        br_if $each_group
      end
      local.get $image
      local.get $image_row
      i32.add
      local.set $image
      local.get $out
      local.get $columns
      local.get $out_pixel
      i32.mul
      i32.add
      local.set $out
      local.get $rows
      i32.const 1
      i32.sub
      local.tee $rows
      br_if $each_row
    end))
